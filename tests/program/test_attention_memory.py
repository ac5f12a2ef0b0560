"""The memory that sparse attention is said to take while it runs, beside what it takes."""

from __future__ import annotations

import itertools

import pytest
import torch
from ranks import Ranks
from sweeps import sweep
from torch import fx

import zgraph
from zgraph.program.attention_memory import working_bytes
from zgraph.program.sparse_attention import SPARSE, SPARSE_BACKWARD, SPARSE_BACKWARD_WITH_MASK
from zgraph.runtime import allocations

LAYOUTS = {
    "BigBird": (zgraph.BigBird(block=64), False),
    "heads differ": (zgraph.BigBird(block=32, different_layout_per_head=True), False),
    "narrow window": (zgraph.LocalWindow(block=64, num_sliding_window_blocks=9), True),
    "wide window": (zgraph.LocalWindow(block=64, num_sliding_window_blocks=17, attention="bidirectional"), False),
    "Fixed": (zgraph.Fixed(block=32, num_local_blocks=8, attention="unidirectional"), True),
    "positions": (zgraph.SlidingWindow(window=300), True),
}
KINDS = ("plain", "a mask", "dropout", "a mask that is learned")
DTYPES = (torch.float32, torch.bfloat16)
# Bytes that may be taken besides; 8 times as many may be said and not taken. (Little beside a step.)
ROOM = 1 << 19


@pytest.fixture(scope="module")
def process():
    """A process of its own: who counts what torch allocates does so until it ends."""
    with Ranks(1) as one:
        yield one


def node_of(target, *args) -> fx.Node:
    graph = fx.Graph()

    def placeholder(x):
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["val"] = x
        return node

    return graph.call_function(target, tuple(placeholder(x) if isinstance(x, torch.Tensor) else x for x in args))


def measured(target, *args):
    """Return (the bytes that an operator takes besides its results, these)."""
    target(*args)
    before = allocations.live()
    allocations.reset_peak()
    results = target(*args)
    return allocations.peak() - before - sum(x.numel() * x.element_size() for x in results), results


def taken_and_said(name: str, kind: str, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Return for the forward and the backward of some attentions what they take, and what is said."""
    allocations.count()
    layout, is_causal = LAYOUTS[name]
    pairs = []
    for rows, heads, heads_of_keys, length, width in ((1, 4, 4, 4096, 16), (2, 4, 2, 1500, 64)):
        query, tangent = (torch.randn(rows, heads, length, width, dtype=dtype) for _ in range(2))
        key, value = (torch.randn(rows, heads_of_keys, length, width, dtype=dtype) for _ in range(2))
        mask = torch.randn(rows, 1, 1, length, dtype=dtype) if kind in ("a mask", "a mask that is learned") else None
        options = (mask, is_causal, None, layout.model_dump_json())
        dropout = (torch.tensor([3]), 0.1) if kind == "dropout" else ()
        given = (query, key, value, *options, *dropout)
        taken, results = measured(SPARSE, *given)
        pairs.append((taken, working_bytes(node_of(SPARSE, *given))))
        backward = SPARSE_BACKWARD_WITH_MASK if kind == "a mask that is learned" else SPARSE_BACKWARD
        given = (tangent, query, key, value, *results, *options, *dropout)
        pairs.append((measured(backward, *given)[0], working_bytes(node_of(backward, *given))))
    return pairs


@sweep("name, kind, dtype", list(itertools.product(LAYOUTS, KINDS, DTYPES)), quick=4)
def test_it_takes_what_is_said(name, kind, dtype, process):
    (pairs,) = process.run(taken_and_said, name, kind, dtype)
    for taken, said in pairs:
        assert taken <= said + ROOM and said <= 3 * taken + 8 * ROOM


def test_other_operators_take_nothing():
    assert working_bytes(node_of(torch.ops.aten.exp.default, torch.randn(3))) == 0
    query = torch.randn(1, 1, 64, 8, device="meta")
    assert working_bytes(node_of(SPARSE, query, query, query, None, False, None, zgraph.Dense().model_dump_json())) == 0

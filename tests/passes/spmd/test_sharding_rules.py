"""Every operator with a rule is the same computed whole and in two parts along each label that may be split.

Parts of results are joined, and results without the label summed or maximised, as the rule says; where sums pass through, terms of an
operand give terms of the result. All in float64, within 1e-12.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

import zgraph
from zgraph.passes.spmd import sharding_rules
from zgraph.passes.spmd.sharding_rules import Dims, Rule, operands_of, rule_of
from zgraph.program import collectives, ops
from zgraph.program.packed_attention import PACKED, PACKED_BACKWARD
from zgraph.program.sparse_attention import SPARSE, SPARSE_BACKWARD, SPARSE_BACKWARD_WITH_MASK

aten, prims = torch.ops.aten, torch.ops.prims
PARTS = 2
SOURCE = torch.Generator().manual_seed(0)

# Attention on a GPU: a CPU has only their shapes.
SHAPES_ONLY = {
    target
    for target in sharding_rules.ATTENTION
    if "for_cpu" not in str(target) and target not in (SPARSE, SPARSE_BACKWARD, SPARSE_BACKWARD_WITH_MASK)
}


@dataclass(frozen=True)
class Example:
    """An operator's call. `sizes_at`: the argument that says how large the result is; `local`: the arguments of a call on parts, of the
    arguments and the results' local shapes, where that is more. `arbitrary`: its results' values mean nothing."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    sizes_at: int | None = None
    local: Callable[[list[Any], list[list[int]]], list[Any]] | None = None
    arbitrary: bool = False

    @property
    def name(self) -> str:
        shapes = [tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in self.args]
        return f"{self.target}{shapes}".replace("torch.", "")[:110]


def x(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Other numbers at every call, the same in every run."""
    return torch.randn(shape, generator=SOURCE, dtype=torch.float64).to(dtype)


def n(high: int, *shape: int) -> torch.Tensor:
    """Indices below `high`."""
    return torch.randint(high, shape, generator=SOURCE)


def _examples() -> list[Example]:
    made: list[Example] = []

    def of(target: Any, *args: Any, **more: Any) -> None:
        own = {k: more.pop(k) for k in ("sizes_at", "local", "arbitrary") if k in more}
        made.append(Example(target, args, more, **own))

    # Element by element, and all that is broadcast.
    of(aten.add.Tensor, x(4, 6), x(4, 6))
    of(aten.add.Tensor, x(4, 6), x(6))
    of(aten.add.Tensor, x(4, 1), x(1, 6), alpha=2)
    of(aten.add.Tensor, x(4, 6), 1.5)
    of(aten.sub.Tensor, x(2, 4, 6), x(4, 1))
    of(aten.mul.Tensor, x(4, 6), x())
    of(aten.mul.Scalar, x(4, 6), 2.0)
    of(aten.div.Scalar, x(4, 6), 2.0)
    of(aten.div.Tensor, x(4, 6), x(4, 6))
    of(aten.neg.default, x(4, 6))
    of(aten.where.self, x(4, 6) > 0, x(6), x())
    of(aten.exp.default, x(2, 1, 4))
    of(aten.clamp.default, x(4, 6), -0.5, 0.5)
    of(aten._to_copy.default, x(4, 6), dtype=torch.float32)
    for same in (aten.clone, aten.alias, aten.detach, aten.lift_fresh_copy):
        of(same.default, x(4, 6))
    of(aten.copy.default, x(4, 6), x(6))
    of(aten.full_like.default, x(4, 6), 3.0)
    of(aten.zeros_like.default, x(4, 6))
    of(aten.ones_like.default, x(4, 6))
    of(aten.empty_like.default, x(4, 6), arbitrary=True)
    of(aten.gelu_backward.default, x(4, 6), x(4, 6), approximate="tanh")
    for backward in (aten.silu_backward, aten.tanh_backward, aten.sigmoid_backward):
        of(backward.default, x(4, 6), x(4, 6))
    of(aten.threshold_backward.default, x(4, 6), x(4, 6), 0)
    of(aten.masked_fill.Scalar, x(4, 6), x(4, 1) > 0, -1.0)
    of(aten.fill.Tensor, x(4, 6), x())
    of(aten.fill.Scalar, x(4, 6), 2.0)
    of(prims.convert_element_type.default, x(4, 6), torch.float32)
    of(ops.OUTPUT, x(4, 6))

    # Products.
    of(aten.mm.default, x(4, 6), x(6, 8))
    of(aten.mm.default, x(1, 6), x(6, 8))
    of(aten.mm.default, x(4, 1), x(1, 8))
    of(aten.bmm.default, x(2, 4, 6), x(2, 6, 8))
    of(aten.bmm.default, x(1, 4, 6), x(1, 6, 8))
    of(aten.addmm.default, x(8), x(4, 6), x(6, 8))
    of(aten.addmm.default, x(4, 1), x(4, 6), x(6, 8), beta=0.5, alpha=2)
    of(aten.addmm.default, x(1), x(4, 6), x(6, 8))
    plain = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    of(aten.convolution.default, x(2, 4, 6, 6), x(8, 4, 3, 3), None, *plain)
    of(aten.convolution.default, x(2, 4, 6, 6), x(8, 4, 3, 3), x(8), *plain)
    of(aten.convolution.default, x(2, 4, 6), x(8, 4, 3), x(8), [2], [0], [1], False, [0], 1)
    of(aten.convolution.default, x(2, 4, 6, 6), x(8, 2, 3, 3), x(8), *plain[:5], 2)
    of(aten.convolution.default, x(2, 4, 6, 6), x(4, 8, 3, 3), x(8), *plain[:3], True, [0, 0], 1)
    ends = torch.tensor([3, 8], dtype=torch.int32)
    of(aten._grouped_mm.default, x(8, 16, dtype=torch.bfloat16), x(2, 16, 32, dtype=torch.bfloat16), ends)

    # Views.
    for target in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
        of(target, x(4, 6), [4, 2, 3], sizes_at=1)
        of(target, x(4, 6, 2), [24, 2], sizes_at=1)
        of(target, x(4, 1, 6), [2, 2, 6, 1], sizes_at=1)
        of(target, x(4, 6), [6, 4], sizes_at=1)
        of(target, x(4, 6, 4), [6, 4, 2, 2], sizes_at=1)
        of(target, x(1), [], sizes_at=1)
    of(aten.permute.default, x(2, 4, 6), [2, -3, 1])
    of(aten.transpose.int, x(2, 4, 6), -1, 0)
    of(aten.t.default, x(4, 6))
    of(aten.t.default, x(4))
    of(aten.expand.default, x(4, 1), [2, 4, 6], sizes_at=1)
    of(aten.unsqueeze.default, x(4, 6), -1)
    of(aten.unsqueeze.default, x(4, 1, 6), 1)
    of(aten.squeeze.dim, x(4, 1, 6), -2)
    of(aten.squeeze.dim, x(4, 6), 0)
    of(aten.squeeze.dims, x(1, 4, 1, 6), [0, -2])
    of(aten.squeeze.default, x(1, 4, 1))
    of(aten.select.int, x(4, 6), -1, 2)
    of(aten.unbind.int, x(3, 4, 6))
    of(aten.unbind.int, x(4, 3, 6), 1)
    of(aten.sort.default, x(4, 6))
    of(aten.sort.default, x(4, 6), 0, True)
    of(aten.topk.default, x(4, 6), 2)
    of(aten.topk.default, x(4, 6), 2, 0)
    of(aten.cumsum.default, x(4, 6), -2)
    of(aten.native_dropout.default, x(4, 6), 0.5, True)

    # Pieces.
    def pieces(args: list[Any], shapes: list[list[int]]) -> list[Any]:
        dim = args[2] if len(args) > 2 else 0
        sizes = [shape[dim] for shape in shapes]
        return [args[0], sizes if isinstance(args[1], list) else sizes[0], *args[2:]]

    of(aten.split.Tensor, x(12, 4), 4, local=pieces)
    of(aten.split.Tensor, x(4, 10), 4, -1, local=pieces)
    of(aten.split_with_sizes.default, x(2, 16), [8, 4, 4], -1, local=pieces)
    of(aten.split_with_sizes.default, x(2, 9), [5, 4], 1, local=pieces)

    def sliced(args: list[Any], shapes: list[list[int]]) -> list[Any]:
        dim, start, end = args[1:4]
        by = (end - start) // shapes[0][dim] if end < 2**31 else 1
        return [args[0], dim, start // by, end // by if by > 1 else end, *args[4:]]

    of(aten.slice.Tensor, x(4, 12), -1, 4, 8, local=sliced)
    of(aten.slice.Tensor, x(4, 12), 1, 0, 2**63 - 1, local=sliced)
    of(aten.slice.Tensor, x(4, 12), 1, 0, 12, 2)
    of(aten.slice.Tensor, x(4, 12), 1, 3, 8)
    of(aten.slice_scatter.default, x(4, 12), x(4, 4), -1, 4, 8)
    of(aten.slice_backward.default, x(4, 4), [4, 12], 1, 4, 8, 1, sizes_at=1)
    of(aten.constant_pad_nd.default, x(4, 6), [0, 0, 1, 1])
    of(aten.constant_pad_nd.default, x(4, 6), [1, 0], 2.0)
    of(aten.flip.default, x(4, 6), [-1])
    of(aten.select_backward.default, x(4), [4, 6], -1, 2, sizes_at=1)
    of(aten.select_scatter.default, x(4, 6), x(4), -1, 2)
    of(aten.cat.default, [x(4, 6), x(4, 2)], 1)
    of(aten.cat.default, [x(4, 8), x(4, 4), x(4, 4)], -1)
    of(aten.cat.default, [x(4, 6), x(2, 6)])
    of(aten.cat.default, [x(4, 6), x(4, 1)], 1)
    of(aten.stack.default, [x(4, 6), x(4, 6)])
    of(aten.stack.default, [x(4, 6), x(4, 6), x(4, 6)], -1)

    # Reductions.
    of(aten.sum.default, x(4, 6))
    for sums in (aten.sum.dim_IntList, aten.amax.default, aten.mean.dim):
        of(sums, x(2, 4, 6), [-1])
        of(sums, x(2, 4, 6), [0, 2], True)
    of(aten.sum.dim_IntList, x(2, 4), None)
    of(aten.amax.default, x(4, 6))
    of(aten.amin.default, x(4, 6), [1])
    of(aten.mean.default, x(4, 6))
    of(aten.any.dim, x(4, 6) > 1, -1)
    of(aten.any.dims, x(2, 4, 6) > 1, [0, -1], True)
    of(aten.var_mean.correction, x(2, 4, 6), [-1], correction=0, keepdim=True)
    of(aten.argmax.default, x(4, 6), -1)
    of(aten.argmax.default, x(4, 6), 0, True)
    of(aten.argmax.default, x(4, 6))
    of(aten.logsumexp.default, x(2, 4, 6), [-1])
    of(aten.logsumexp.default, x(4, 6), [0], True)
    for softmax in (aten._softmax, aten._log_softmax):
        of(softmax.default, x(2, 4, 6), -1, False)
        of(softmax.default, x(4, 6), 0, False)
    of(aten._safe_softmax.default, x(2, 4, 6), -1)
    for softmax in (aten._softmax_backward_data, aten._log_softmax_backward_data):
        of(softmax.default, x(4, 6), x(4, 6).softmax(-1), -1, torch.float64)
    of(aten.native_layer_norm.default, x(2, 4, 6), [6], x(6), x(6), 1e-5)
    of(aten.native_layer_norm.default, x(2, 4, 6), [4, 6], None, None, 1e-5)
    rows = x(2, 4, 6)
    _, mean, scale = aten.native_layer_norm(rows, [6], None, None, 1e-5)
    for mask in ([True, True, True], [True, False, True]):
        of(aten.native_layer_norm_backward.default, x(2, 4, 6), rows, [6], mean, scale, x(6), x(6), mask)

    # By index.
    of(aten.embedding.default, x(8, 6), n(8, 2, 4))
    of(aten.embedding.default, x(8, 6), n(8, 4), 0)
    of(aten.embedding_dense_backward.default, x(2, 4, 6), n(8, 2, 4), 8, -1, False)
    of(aten.embedding_dense_backward.default, x(4, 6), n(8, 4), 8, 3, False)
    of(aten.gather.default, x(4, 6), 1, n(6, 4, 2))
    of(aten.gather.default, x(4, 6), -1, n(6, 2, 2))
    of(aten.scatter.src, x(4, 6), 1, n(6, 4, 1), x(4, 1))
    of(aten.scatter.value, x(4, 6), 0, n(4, 1, 6), 2.0)
    of(aten.scatter_add.default, x(4, 6), 1, n(6, 4, 3), x(4, 3))
    of(aten.index.Tensor, x(4, 6), [None, n(6, 4)])
    of(aten.index.Tensor, x(4, 6, 2), [n(4, 2, 4)])
    of(aten.index.Tensor, x(4, 6), [n(4, 2), n(6, 2)])
    of(aten.index_put.default, x(4, 6), [n(4, 2)], x(2, 6), True)
    of(aten.index_put.default, x(2, 6, 4), [None, n(6, 8)], x(2, 8, 4), True)
    logs = x(4, 6).log_softmax(-1)
    of(aten.nll_loss_forward.default, logs, n(6, 4), None, 1, -100)
    for how, grad in ((1, x()), (0, x(4))):
        of(aten.nll_loss_backward.default, grad, logs, n(6, 4), None, how, -100, torch.tensor(4.0).double())

    # Made of nothing.
    of(aten.new_zeros.default, x(3), [4, 6], sizes_at=1)
    of(aten.new_ones.default, x(4, 6), [4, 6], sizes_at=1)
    of(aten.new_full.default, x(4, 6), [4], 2.0, sizes_at=1)
    of(aten.new_empty.default, x(4, 6), [4], sizes_at=1, arbitrary=True)
    of(aten.full.default, [4, 6], 2.0, sizes_at=0)
    of(aten.zeros.default, [4, 6], sizes_at=0)
    of(aten.ones.default, [4, 6], sizes_at=0)
    of(aten.empty.memory_format, [4], sizes_at=0, arbitrary=True)

    # Attention: queries, keys and values of batch 2 with 4 heads; then of fewer key-value heads, and inside of packed documents.
    q, k = x(2, 4, 6, 8), x(2, 4, 10, 8)
    mixed = aten._scaled_dot_product_flash_attention_for_cpu
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward
    for mask in (None, x(2, 1, 6, 10), x(2, 4, 6, 10)):
        of(mixed.default, q, k, k, 0.0, False, attn_mask=mask)
        out, sums = mixed(q, k, k, 0.0, False, attn_mask=mask)
        of(back.default, x(*out.shape), q, k, k, out, sums, 0.0, False, attn_mask=mask)
    out, sums = mixed(q, k[:, :2], k[:, :2], 0.0, False)
    of(mixed.default, q, k[:, :2], k[:, :2], 0.0, False)
    of(back.default, x(*out.shape), q, k[:, :2], k[:, :2], out, sums, 0.0, False)
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [4] * 6])
    out, sums = PACKED(q, q, q, documents, None, True, None)
    of(PACKED, q, q, q, documents, None, True, None)
    of(PACKED_BACKWARD, x(*out.shape), q, q, q, out, sums, documents, None, True, None)
    for keys, mask in ((q, None), (q, x(2, 1, 6, 6)), (q[:, :2], x(6, 6))):
        options = (mask, True, None, zgraph.LocalWindow(block=8).model_dump_json())
        out, sums = SPARSE(q, keys, keys, *options)
        of(SPARSE, q, keys, keys, *options)
        of(SPARSE_BACKWARD, x(*out.shape), q, keys, keys, out, sums, *options)
    for mask in (x(6, 6), x(1, 4, 6, 6), x(2, 1, 1, 6), x(2, 4, 6, 6)):
        options = (mask, True, None, zgraph.LocalWindow(block=8).model_dump_json())
        out, sums = SPARSE(q, q, q, *options)
        of(SPARSE_BACKWARD_WITH_MASK, x(*out.shape), q, q, q, out, sums, *options)
    q, k = (t.to("meta", torch.float16) for t in (x(2, 4, 64, 8), x(2, 4, 64, 8)))
    for gpu, last in (
        (aten._scaled_dot_product_flash_attention, (0.0, False, False)),
        (aten._scaled_dot_product_cudnn_attention, (None, True, 0.0, False, False)),
        (aten._scaled_dot_product_efficient_attention, (None, True)),
    ):
        of(gpu.default, q, k, k, *last)
        given = gpu(q, k, k, *last)
        back = getattr(aten, f"{gpu.__name__.rpartition('.')[2]}_backward").default
        if "flash" in str(gpu):
            of(back, q, q, k, k, given[0], given[1], None, None, 64, 64, 0.0, False, *given[6:8])
        elif "cudnn" in str(gpu):
            seeds = given[6:8]
            of(back, q, q, k, k, given[0], given[1], *seeds, None, None, None, 64, 64, 0.0, False)
        else:
            of(back, q, q, k, k, None, *given, 0.0, [True, True, True, False])
    return made


EXAMPLES = _examples()


def node_of(example: Example) -> fx.Node:
    """The example's call as a node of a graph, with its values."""
    graph = fx.Graph()

    def enter(a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            node = graph.placeholder("x")
            node.meta["val"] = a
            return node
        return [enter(i) for i in a] if isinstance(a, list) else a

    node = graph.call_function(
        example.target, tuple(enter(a) for a in example.args), {k: enter(v) for k, v in example.kwargs.items()}
    )
    node.meta["val"] = run(example.target, example.args, example.kwargs)
    return node


def run(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    made = target(*args, **kwargs)
    return tuple(made) if isinstance(made, (tuple, list)) else made


def several(made: Any) -> list[torch.Tensor]:
    """An operator's results; what is no tensor stands as one without dimensions."""
    return [
        m if isinstance(m, torch.Tensor) else torch.zeros(()) for m in (made if isinstance(made, tuple) else (made,))
    ]


def place(dims: Dims, rule: Rule, label: str) -> tuple[int, int] | None:
    """The dimension that has a label, and how often the label's index is walked there."""
    for d, within in enumerate(dims):
        if label in within:
            return d, math.prod(rule.sizes[other] for other in within[: within.index(label)])
    return None


def part(value: torch.Tensor, at: tuple[int, int] | None, rule: Rule, label: str, rank: int) -> torch.Tensor:
    if at is None:
        return value
    dim, outer = at
    opened = value.reshape(*value.shape[:dim], outer, rule.sizes[label], -1, *value.shape[dim + 1 :])
    mine = opened.chunk(PARTS, dim + 1)[rank]
    return mine.reshape(*value.shape[:dim], value.shape[dim] // PARTS, *value.shape[dim + 1 :]).contiguous()


def joined(parts: list[torch.Tensor], at: tuple[int, int] | None, how: str) -> torch.Tensor:
    if at is None:
        return sum(parts[1:], parts[0]) if how == "sum" else torch.stack(parts).amax(0)
    dim, outer = at
    shape = parts[0].shape
    opened = [p.reshape(*shape[:dim], outer, -1, *shape[dim + 1 :]) for p in parts]
    return torch.cat(opened, dim + 1).reshape(*shape[:dim], shape[dim] * PARTS, *shape[dim + 1 :])


def splittable(rule: Rule) -> list[str]:
    return [label for label, size in rule.sizes.items() if label not in rule.whole and size % PARTS == 0]


def in_parts(example: Example, node: fx.Node, rule: Rule, label: str) -> list[list[torch.Tensor]]:
    """What the operator gives on each rank of its parts along a label."""
    places = [place(dims, rule, label) for dims in rule.operands]
    whole = several(node.meta["val"])
    made = []
    for rank in range(PARTS):
        values = [o.meta["val"] for o in operands_of(node)]
        left = iter([part(v, at, rule, label, rank) for v, at in zip(values, places, strict=True)])
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda _, left=left: next(left))
        shapes = [
            list(part(w, place(dims, rule, label), rule, label, 0).shape)
            for w, dims in zip(whole, rule.results, strict=True)
        ]
        mine = list(args)
        if example.sizes_at is not None:
            mine[example.sizes_at] = shapes[0]
        if example.local is not None:
            mine = example.local(mine, shapes)
        made.append(several(run(example.target, mine, dict(kwargs))))
        assert [list(m.shape) for m in made[-1]] == shapes
    return made


def assert_equal(mine: torch.Tensor, whole: torch.Tensor) -> None:
    assert mine.dtype is whole.dtype or whole.dtype is torch.bool
    if not whole.dtype.is_floating_point:
        assert torch.equal(mine.to(whole.dtype), whole)
        return
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6}.get(whole.dtype, 2e-2)
    assert float((mine - whole).double().norm()) <= tolerance * (1e-300 + float(whole.double().norm()))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
def test_an_operator_in_parts_is_the_operator(example):
    node = node_of(example)
    rule = rule_of(node)
    if rule is None:
        return
    whole = several(node.meta["val"])
    assert [len(d) for d in rule.operands] == [o.meta["val"].dim() for o in operands_of(node)]
    assert [len(d) for d in rule.results] == [w.dim() for w in whole]
    for label in splittable(rule):
        made = in_parts(example, node, rule, label)
        if example.arbitrary or example.target in SHAPES_ONLY:
            continue
        for i, (dims, result) in enumerate(zip(rule.results, whole, strict=True)):
            at = place(dims, rule, label)
            nowhere = i in rule.alike or all(place(d, rule, label) is None for d in rule.operands)
            found = made[0][i] if nowhere and at is None else joined([m[i] for m in made], at, rule.reduction)
            assert_equal(found, result)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
def test_a_sum_over_ranks_passes_through_an_operator_that_is_linear(example):
    node = node_of(example)
    rule = rule_of(node)
    if rule is None or not rule.linear:
        return
    values = [o.meta["val"] for o in operands_of(node)]
    first = [x(*v.shape) for v in values]
    terms = [[a, v - a] if i in rule.linear else [v, v] for i, (a, v) in enumerate(zip(first, values, strict=True))]
    made = []
    for rank in range(2):
        left = iter([t[rank] for t in terms])
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda _, left=left: next(left))
        made.append(several(run(example.target, args, dict(kwargs))))
    for one, other, result in zip(*made, several(node.meta["val"]), strict=True):
        assert float((one + other - result).norm()) <= 1e-12 * (1 + float(result.norm()))


def test_every_rule_has_an_example_that_it_divides():
    divided, all_examples = set(), {e.target for e in EXAMPLES}
    for example in EXAMPLES:
        rule = rule_of(node_of(example))
        if rule is not None and splittable(rule):
            divided.add(example.target)
    between = {
        collectives.WAIT,
        *collectives.known_targets(),
    }  # (need ranks: a program divided over two mesh dimensions has them)
    ruled = {*sharding_rules._RULES, *sharding_rules._POINTWISE} - between
    assert not ruled - all_examples
    # (a mean of all has nothing else, a minimum no collective, a loss is divided as its expansion, and a dropout draws for all)
    whole = {aten.amin.default, aten.mean.default, aten.nll_loss_forward.default, aten.native_dropout.default}
    assert ruled - divided == whole


@pytest.mark.parametrize("name", sharding_rules._NAMED)
def test_an_operator_of_a_library_in_parts_is_the_operator(name):
    pytest.importorskip("transformers.integrations.moe")
    space, _, short = name.partition("::")
    ends = torch.tensor([3, 8], dtype=torch.int32)
    grads = [x(8, 6)] if short.endswith("backward") else []
    example = Example(getattr(getattr(torch.ops, space), short).default, (x(8, 4), x(2, 4, 6), ends, *grads))
    rule = rule_of(node_of(example))
    assert rule is not None and splittable(rule) == ["k", "n"]
    test_an_operator_in_parts_is_the_operator(example)


@st.composite
def views(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes of as many elements, cut out of the same product of small factors."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=6))

    def cut() -> list[int]:
        shape, at = [], 0
        while at < len(factors):
            size = draw(st.integers(1, len(factors) - at))
            shape.append(math.prod(factors[at : at + size]))
            at += size
        return shape + [1] * draw(st.integers(0, 1))

    one = cut()
    if draw(st.booleans()):
        factors = factors[::-1]
    return one, cut()


@settings(max_examples=150, deadline=None)
@given(views())
def test_any_view_in_parts_is_the_view(shapes):
    before, after = shapes
    test_an_operator_in_parts_is_the_operator(Example(aten.view.default, (x(*before), after), sizes_at=1))


def test_attention_that_draws_is_walked_as_a_whole():
    """(Ranks with other heads would draw the same numbers for them.)"""
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    for rate, ruled in ((0.0, True), (0.5, False)):
        node = node_of(Example(attention, (x(2, 4, 6, 8), x(2, 4, 6, 8), x(2, 4, 6, 8), 0.0)))
        node.update_arg(3, rate)
        assert (rule_of(node) is not None) == ruled

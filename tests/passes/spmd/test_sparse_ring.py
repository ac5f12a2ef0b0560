"""Sparse attention of sequences that ranks have parts of: only keys that are read are sent, and numbers are those of plain PyTorch with a mask."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from ranks import Ranks
from sweeps import product, sweep
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import zgraph
from zgraph.build.planned_step import programs
from zgraph.errors import PlanError
from zgraph.plan.attention import Sparsity
from zgraph.program import attention_of_rows, collectives
from zgraph.program.attention_of_rows import MOST_RANGES, OF_ROWS, Hop, hops_of
from zgraph.program.flops import product_flops
from zgraph.program.node import Phase, info, tensor
from zgraph.program.program import Program
from zgraph.program.sparse_attention import SPARSE, SPARSE_BACKWARD
from zgraph.verification.masked_attention import layout_mask, masks_of

WORDS, WIDTH, HEADS, LENGTH = 50, 24, 3, 96  # (neither 2 nor 4 ranks divide the heads)
BOUND = 2e-6  # of float32: sums of a block's keys and of a row's blocks come in another order


def near_or_first(batch, head, query, key):
    return ((query - key).abs() < 4 * (head + 1)) | (key < 3)


def far(batch, head, query, key):
    return (query - key >= 40) | (query == key)


LAYOUTS: dict[str, Sparsity] = {
    "window": zgraph.LocalWindow(block=8, num_sliding_window_blocks=3, attention="bidirectional"),
    "positions": zgraph.SlidingWindow(window=11, ahead=5, block=8),
    "blocks apart": zgraph.Fixed(block=8, num_local_blocks=3, num_global_blocks=1),
    "own block": zgraph.LocalWindow(block=8, num_sliding_window_blocks=1),
    "random": zgraph.BigBird(block=8, num_random_blocks=1, seed=1),
    "heads differ": zgraph.BigBird(block=8, num_random_blocks=1, different_layout_per_head=True),
    "function": zgraph.MaskFunction(function=f"{__name__}:near_or_first", block=8),
    "across ranks": zgraph.LocalWindow(block=16, num_sliding_window_blocks=3),  # (24 rows a rank, or two pieces of 12)
    "nothing": zgraph.BlockLayout(block=32, layout=["000", "010", "101"]),
}


# -- hops -------------------------------------------------------------------------------------------------------------
def hops(sparsity: Sparsity, is_causal: bool, ranks: int, pieces: int = 1) -> tuple[Hop, ...]:
    return hops_of(sparsity.model_dump_json(), HEADS, LENGTH, is_causal, ranks, pieces)


def test_a_window_is_read_from_neighbours_alone():
    assert hops(LAYOUTS["window"], True, 4) == (Hop(1, ((16, 24),)),)
    assert hops(LAYOUTS["window"], False, 4) == (Hop(3, ((0, 8),)), Hop(1, ((16, 24),)))
    assert hops(LAYOUTS["positions"], True, 4) == (Hop(1, ((8, 24),)),)
    assert hops(LAYOUTS["own block"], False, 4) == ()
    # Folded, ranks have 16 rows from 16 r on, and 16 from 16 (7 - r) on: the rank before has what is before the first, the one behind what is
    # before the second.
    folded = hops_of(LAYOUTS["window"].model_dump_json(), HEADS, 128, True, 4, 2)
    assert folded == (Hop(3, ((24, 32),)), Hop(1, ((8, 16),)))


def test_hops_that_nobody_needs_are_skipped_in_between():
    sparsity = zgraph.BlockLayout(block=8, layout=[[int(j in (i, i - 6)) for j in range(12)] for i in range(12)])
    assert hops(sparsity, True, 4) == (Hop(2, ((0, 24),)),)


def test_ranges_that_are_too_many_are_joined_over_the_narrowest_gaps():
    read = {*range(0, 32, 4), 32, 34}
    squares = [[int(j == i or j in read) for j in range(96)] for i in range(96)]
    sparsity = zgraph.BlockLayout(block=8, layout=squares)
    (hop,) = hops_of(sparsity.model_dump_json(), 1, 768, True, 2, 1)
    assert hop.distance == 1 and len(hop.ranges) == MOST_RANGES
    assert hop.ranges == (*((8 * j, 8 * j + 8) for j in range(0, 28, 4)), (28 * 8, 35 * 8))


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_has_what_its_queries_see(layout, pieces):
    """By the whole mask, position by position."""
    shown = layout_mask(LAYOUTS[layout], HEADS, LENGTH).any(0)
    for is_causal in (False, True):
        seen = shown & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() if is_causal else shown
        rows = list(torch.arange(LENGTH).view(4 * pieces, -1))
        of = [torch.cat([rows[r], *([rows[7 - r]] if pieces == 2 else [])]) for r in range(4)]
        sent = {hop.distance: hop.ranges for hop in hops(LAYOUTS[layout], is_causal, 4, pieces)}
        for rank in range(4):
            for distance in range(1, 4):
                there = of[(rank - distance) % 4]
                kept = torch.zeros(24, dtype=torch.bool)
                for first, end in sent.get(distance, ()):
                    kept[first:end] = True
                assert not (seen[of[rank]][:, there].any(0) & ~kept).any()


# -- operators --------------------------------------------------------------------------------------------------------
MASKS = {
    "none": None,
    "padding": torch.where(torch.arange(LENGTH) % 7 == 0, -torch.inf, 0.0).double().view(1, 1, 1, LENGTH),
    "one for all": torch.arange(LENGTH**2).view(LENGTH, LENGTH).double().sin(),
    "of rows": torch.arange(LENGTH).view(1, 1, LENGTH, 1).double().sin(),
    "of heads": torch.arange(6 * LENGTH**2).view(2, 3, LENGTH, LENGTH).double().sin(),
}


@product(
    "layout, is_causal, pieces, dropout, mask",
    list(LAYOUTS),
    [False, True],
    [1, 2],
    [0.0, 0.3],
    list(MASKS),
    together=1,
)
def test_ranks_compute_what_one_does(layout, is_causal, pieces, dropout, mask):
    torch.manual_seed(0)
    ranks, sparsity = 4, LAYOUTS[layout]
    query, key, value, tangent = (torch.randn(2, n, LENGTH, 8, dtype=torch.float64) for n in (3, 1, 1, 3))
    options = (
        MASKS[mask],
        is_causal,
        0.3,
        sparsity.model_dump_json(),
        torch.tensor([77]) if dropout else None,
        dropout,
    )
    out, sums = SPARSE(query, key, value, *options)
    expected = [out, sums, *SPARSE_BACKWARD(tangent, query, key, value, out, sums, *options)]
    results = [torch.zeros_like(x) for x in expected]
    cut = list(torch.arange(LENGTH).view(ranks * pieces, -1))
    rows = [torch.cat([cut[r], *([cut[2 * ranks - 1 - r]] if pieces == 2 else [])]) for r in range(ranks)]
    chosen = hops(sparsity, is_causal, ranks, pieces)
    for rank, own in enumerate(rows):
        others = [rows[rank - hop.distance][first:end] for hop in chosen for first, end in hop.ranges]
        gathered = torch.cat([*others, own])
        told = (torch.tensor([rank]), ranks, pieces)
        given = (query[:, :, own], key[:, :, gathered], value[:, :, gathered])
        part = OF_ROWS[SPARSE](*given, *options, *told)
        grads = OF_ROWS[SPARSE_BACKWARD](tangent[:, :, own], *given, *part, *options, *told)
        for at, x in enumerate((*part, grads[0])):
            results[at][:, :, own] = x
        for at, x in enumerate(grads[1:], start=3):
            results[at].index_add_(2, gathered, x)
    for x, y in zip(results, expected, strict=True):
        assert torch.allclose(x, y, rtol=0, atol=1e-12)


def test_keys_that_were_not_gathered_are_found(monkeypatch):
    """By the operator, where the pass and it disagree."""
    x = torch.randn(1, 1, 24, 8)
    monkeypatch.setattr(attention_of_rows, "hops_of", lambda *_: ())
    attention_of_rows._pieces_of.cache_clear()
    told = (None, True, None, LAYOUTS["window"].model_dump_json(), None, 0.0, torch.tensor([1]), 4, 1)
    with pytest.raises(AssertionError, match="has not gathered a key"):
        OF_ROWS[SPARSE](x, x, x, *told)


# -- models -----------------------------------------------------------------------------------------------------------
class Attention(nn.Module):
    def __init__(
        self, *, causal: bool = True, heads: int = HEADS, heads_of_keys: int | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.causal, self.dropout, width = causal, dropout, WIDTH // HEADS
        self.q, self.out = nn.Linear(WIDTH, width * heads), nn.Linear(width * heads, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, width * (heads_of_keys or heads)) for _ in range(2))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        options = {"is_causal": self.causal, "enable_gqa": k.shape != q.shape, "dropout_p": self.dropout}
        return self.out(F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.layers = nn.ModuleList(Attention(**options) for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))

    def forward(self, words):
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def words(rows: int = 2, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def plan(attention: dict[str, Sparsity], ranks: int = 4, **fields: Any) -> zgraph.Plan:
    fields = {"mesh": {"cp": ranks}, "backend": "eager", "context_attention": "ring", **fields}
    return zgraph.Plan(attention=attention, **fields)


@sweep("layout, causal, ranks", list(itertools.product(LAYOUTS, [True, False], [2, 4])), quick=4)
def test_models_compute_what_one_process_does(layout, causal, ranks):
    result = zgraph.verify(net(causal=causal), plan({"*": LAYOUTS[layout]}, ranks), ranks, (words(),))
    assert result.ok, result
    assert any(d.what == "gradient" for d in result.differences)


MORE: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "fewer heads of keys": (4, {"heads_of_keys": 1}, {}),
    "dropout": (4, {"dropout": 0.2}, {}),
    "dropout, both ways": (4, {"dropout": 0.2, "causal": False}, {}),
    "half precision": (4, {}, {"precision": "bf16"}),
    "recomputed": (2, {}, {"recompute": "full"}),
    "by itself": (2, {}, {"context_attention": "auto"}),
    "with ranks of data": (4, {}, {"mesh": {"dp": 2, "cp": 2}, "zero": 3}),
    "micro-batches": (2, {"dropout": 0.2}, {"micro_batches": 2}),
    "with a pipeline": (4, {}, {"mesh": {"pp": 2, "cp": 2}, "micro_batches": 2}),
    "in few bits": (2, {}, {"wire": {"activations": "int8", "block": 16}}),
    "compiled": (2, {"dropout": 0.2}, {"backend": "inductor"}),
}


@sweep("more", list(MORE), quick=(0,))
def test_it_goes_together_with_the_rest_of_a_plan(more):
    world, options, fields = MORE[more]
    mesh = fields.get("mesh", {"cp": world})
    result = zgraph.verify(
        net(**options), plan({"*": LAYOUTS["window"]}, **{**fields, "mesh": mesh}), world, (words(4),)
    )
    assert result.ok, result


@pytest.mark.slow
def test_of_two_mesh_dimensions_one_divides_heads_and_one_the_sequence():
    model = net(heads=4)
    asked = plan({"*": LAYOUTS["random"]}, mesh={"tp": 2, "cp": 2})
    result = zgraph.verify(model, asked, 4, (words(),))
    assert result.ok, result
    calls = calls_of(programs(model, asked, (words(),), 4).after("divide_context"))
    assert [tensor(n.args[0]).shape[1] for n in calls if n.target is OF_ROWS[SPARSE]] == [2, 2]


@pytest.mark.slow
def test_whole_layers_beside_it_fold_the_sequence():
    """A causal layer that is whole gives each rank a piece from the front and one from the back."""
    asked = plan({"layers.0": LAYOUTS["across ranks"]})
    result = zgraph.verify(net(), asked, 4, (words(),))
    assert result.ok, result
    program = programs(net(), asked, (words(),), 4).after("divide_context")
    assert {n.args[-1] for n in calls_of(program)} == {2}


# -- what is sent -----------------------------------------------------------------------------------------------------
def calls_of(program: Program) -> list[Any]:
    return [n for n in program.nodes if n.target in OF_ROWS.values()]


def shifts(program: Program, phase: Phase) -> list[tuple[int, int]]:
    """(the distance, the rows) of what a rank sends."""
    starts = [n for n in program.nodes if n.target is collectives.SHIFT and info(n).phase is phase]
    return [(collectives.distance_of(n), tensor(n).shape[2]) for n in starts]


def test_hops_are_skipped_and_rows_that_nobody_reads_stay():
    model, asked = net(), plan({"layers.0": LAYOUTS["window"], "*": LAYOUTS["own block"]})
    made = programs(model, asked, (words(),), 4)
    program = made.after("divide_context")
    assert shifts(program, Phase.FORWARD) == 2 * [(1, 8)], "keys and values of the first layer, a block of each"
    assert shifts(program, Phase.BACKWARD) == [(1, 8), (1, 8), (3, 8), (3, 8)], "once more, and their gradients back"
    assert all(tensor(n.args[1]).shape[2] in (24, 24 + 8) for n in calls_of(program) if n.target is OF_ROWS[SPARSE])


@pytest.mark.slow
def test_the_forecast_counts_what_is_sent_and_computed():
    results = {}
    for name in ("own block", "window", "random"):
        made = programs(net(), plan({"*": LAYOUTS[name]}), (words(),), 4)
        program = made.after("divide_context")
        results[name] = sum(
            tensor(n).numel() * 4
            for n in program.nodes
            if n.target is collectives.SHIFT and info(n).phase is Phase.FORWARD
        )
        flops = [
            sum(product_flops(n) for n in made.after(name_of_pass).nodes if "sparse_attention" in str(n.target))
            for name_of_pass in ("sparse_attention", "divide_context")
        ]
        assert flops[1] == flops[0] // 4
    assert results["own block"] == 0 < results["window"] < results["random"]


def test_sizes_that_are_symbols_are_refused():
    with pytest.raises(PlanError, match="in one program, and mesh\\.cp is set"):
        plan({"*": LAYOUTS["window"]}, shapes="dynamic")


class Masked(Net):
    """One layer, with a mask of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.learned = nn.Parameter(torch.randn(1, HEADS, LENGTH, LENGTH))
        self.register_buffer("slopes", torch.tensor([0.1, 0.2, 0.4]).view(HEADS, 1, 1))

    def forward(self, words):
        x, at = self.words(words), torch.arange(words.shape[1])
        documents = (words == 5).cumsum(1)
        masks = {
            "padding": lambda: (words > 2)[:, None, None, :],
            "documents": lambda: documents[:, None, :, None] == documents[:, None, None, :],
            "of positions": lambda: (at[:, None] - at) % 3 == 0,
            "of heads": lambda: -self.slopes * (at[:, None] - at).abs(),
            "learned": lambda: self.learned,
        }
        q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        seen = F.scaled_dot_product_attention(q, q, q, attn_mask=masks[self.kind]())
        return F.cross_entropy(self.head(x + seen.transpose(1, 2).flatten(2)).flatten(0, 1), words.flatten())


@sweep(
    "kind, layout",
    [
        (kind, layout)
        for kind in ("padding", "documents", "of positions", "of heads")
        for layout in ("window", "heads differ", "function", "nothing")
    ],
    quick=(0, 10),
)
def test_masks_of_the_model_hide_what_the_layout_shows(kind, layout):
    asked = plan({"*": LAYOUTS[layout]})
    result = zgraph.verify(Masked(kind), asked, 4, (words(),))
    assert result.ok, result
    made = programs(Masked(kind), asked, (words(),), 4)
    assert len(calls_of(made.after("divide_context"))) == 2


def test_a_mask_that_is_learned_goes_by_heads_and_a_ring_is_refused(caplog):
    asked = plan({"*": LAYOUTS["window"]}, context_attention="auto")
    result = zgraph.verify(Masked("learned"), asked, 4, (words(),))
    assert result.ok, result
    assert "4 does not divide its heads, and a mask" in caplog.text, "computed whole on each rank"
    with pytest.raises(PlanError, match="no attention of the model can be computed by a ring") as refused:
        zgraph.verify(Masked("learned"), plan({"*": LAYOUTS["window"]}), 4, (words(),))
    assert "a mask with a gradient" in str(refused.value) and 'context_attention="heads"' in str(refused.value)


class Cross(nn.Module):
    """Queries of one sequence, and keys of another."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.attention = nn.Embedding(WORDS, WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ours, theirs):
        x, y = self.words(ours), self.words(theirs)
        seen, _ = self.attention(x, y, y, need_weights=False)
        return F.cross_entropy(self.head(x + seen).flatten(0, 1), ours.flatten())


@pytest.mark.parametrize("layout", [pytest.param("window", marks=pytest.mark.slow), "heads differ"])
@pytest.mark.slow
def test_keys_may_be_those_of_another_sequence(layout):
    """In torch's own layer, which folds heads into rows."""
    asked = plan({"*": LAYOUTS[layout]})
    given = (words(), words(seed=1))
    result = zgraph.verify(Cross(), asked, 4, given)
    assert result.ok, result
    assert len(calls_of(programs(Cross(), asked, given, 4).after("divide_context"))) == 2


class SentBytes(TorchDispatchMode):
    """The bytes that this rank has sent to others of `cp`, by what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is collectives.ALL_TO_ALL:
            x, _, sent, _ = args
            self.bytes += sum(sent) * x[0].nbytes
        return func(*args, **(kwargs or {}))


def trained(lengths: tuple[int, ...], layouts: dict[str, Sparsity], options: dict[str, Any], fields: dict[str, Any]):
    """Train a step of each length; return how far this rank is from one process, and the bytes that it sent in the last step."""
    asked = plan(layouts, optimizer=zgraph.SGD(lr=0.1), **fields)
    plain = net(**options)
    compiled: Any = zgraph.compile(copy.deepcopy(plain), asked)
    for step, length in enumerate(lengths):
        given = words(length=length, seed=step)
        torch.manual_seed(step)
        with SentBytes() as sent:
            compiled.train_step(given)
        torch.manual_seed(step)
        with masks_of(plain, asked.attention):
            plain(given).backward()
        for param in plain.parameters():
            param.data -= 0.1 * param.grad
            param.grad = None
    state = zgraph.full_state_dict(compiled)
    return max(float((p.detach() - state[n]).abs().max()) for n, p in plain.named_parameters()), sent.bytes


TWO_LAYOUTS = {"layers.0": LAYOUTS["heads differ"], "*": LAYOUTS["positions"]}


@pytest.mark.gloo
@pytest.mark.parametrize(
    "backend, dropout",
    [("eager", 0.0), *(pytest.param(*p, marks=pytest.mark.slow) for p in (("eager", 0.2), ("inductor", 0.0)))],
)
def test_four_ranks_train_as_one_process(four: Ranks, backend, dropout):
    options = {"heads_of_keys": 1, "dropout": dropout}
    results = four.run(trained, (LENGTH,) * 3, TWO_LAYOUTS, options, {"backend": backend})
    assert max(far_off for far_off, _ in results) < BOUND


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_two_ranks_take_lengths_that_no_block_divides(two: Ranks, backend):
    """Each has a program of its own. (Inductor draws other seeds than plain PyTorch.)"""
    fields = {"mesh": {"cp": 2}, "backend": backend}
    options = {"dropout": 0.2 if backend == "eager" else 0.0}
    results = two.run(trained, (90, 94, 30, 6, 90), TWO_LAYOUTS, options, fields)
    assert max(far_off for far_off, _ in results) < BOUND


@pytest.mark.gloo
@pytest.mark.slow
def test_four_ranks_of_two_dimensions_train_as_one_process(four: Ranks):
    """`tp` divides four heads, and `cp` the sequence."""
    fields = {"mesh": {"tp": 2, "cp": 2}}
    results = four.run(trained, (LENGTH, 90), {"*": LAYOUTS["random"]}, {"heads": 4}, fields)
    assert max(far_off for far_off, _ in results) < BOUND


@pytest.mark.gloo
@pytest.mark.parametrize(
    "layout, rows",
    [
        pytest.param("own block", 0, marks=pytest.mark.slow),
        ("window", 8),
        pytest.param("positions", 16, marks=pytest.mark.slow),
    ],
)
def test_ranks_send_the_rows_that_are_read_and_no_others(four: Ranks, layout, rows):
    """Of two layers' keys and values, float32, forward and backward, and of their gradients; one rank of three is sent to."""
    results = four.run(trained, (LENGTH, LENGTH), {"*": LAYOUTS[layout]}, {}, {})
    assert [sent for _, sent in results] == [2 * 2 * 3 * (2 * rows * WIDTH * 4)] * 4

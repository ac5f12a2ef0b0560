"""Attention inside of packed documents: recognised by its mask, computed document by document, without a mask of rows x rows."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from sweeps import sweep
from torch import nn
from torch.nn import functional as F

import zgraph
from zgraph.build.planned_step import captured_program
from zgraph.passes.canonicalize.cleanup import cleanup
from zgraph.passes.canonicalize.packed_documents import packed_documents
from zgraph.program.packed_attention import BLOCK, BLOCK_BACKWARD, PACKED
from zgraph.program.program import Program
from zgraph.verification.virtual_stages import VirtualPipeline
from zgraph.verification.virtual_step import virtual_step

warnings.filterwarnings("ignore")
LENGTH, WIDTH, ROWS = 12, 8, 2


class Masked(nn.Module):
    """Attention with a mask that is made of what it is given."""

    def __init__(self, mask_of) -> None:
        super().__init__()
        self.inner, self.mask_of = nn.Linear(WIDTH, 3 * WIDTH), mask_of

    def forward(self, x, numbers):
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.inner(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask_of(numbers)).square().mean()


def double(number: float) -> torch.Tensor:
    return torch.full((), number, dtype=torch.float64)


def q_and_k(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return numbers[:, None, :, None], numbers[:, None, None, :]


def same(numbers: torch.Tensor) -> torch.Tensor:
    q, k = q_and_k(numbers)
    return q == k


def not_behind(length: int = LENGTH) -> torch.Tensor:
    return torch.arange(length)[None, :] <= torch.arange(length)[:, None]


def documents_of(places: torch.Tensor) -> torch.Tensor:
    return (torch.diff(places, prepend=places[:, :1] - 1) != 1).cumsum(-1)


def of_places(places: torch.Tensor) -> torch.Tensor:
    q, k = q_and_k(places)
    return (k <= q) & same(documents_of(places))


def in_pairs(numbers: torch.Tensor) -> torch.Tensor:
    hidden = (numbers[:, :, None] != numbers[:, None, :]) | ~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return torch.zeros(ROWS, LENGTH, LENGTH, dtype=torch.float64).masked_fill(hidden, -torch.inf).unsqueeze(1)


def of_lengths(starts: torch.Tensor) -> torch.Tensor:
    """Of cumulated lengths: one row."""
    of = torch.searchsorted(starts, torch.arange(LENGTH), right=True)
    return (of[:, None] == of[None, :]) & not_behind()


STARTS = torch.tensor([0, 3, 4, 12])
NUMBERS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 5], [3] * 12])
PLACES = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 0, 1, 2, 3], [5, 6, 7, 8, 0, 1, 2, 3, 4, 5, 6, 7]])
MASKS: dict[str, tuple[Any, torch.Tensor]] = {
    "numbers": (same, NUMBERS),
    "numbers, causal": (lambda n: same(n) & not_behind(), NUMBERS),
    "places that start again": (of_places, PLACES),
    "what is hidden": (in_pairs, NUMBERS),
    "cumulated lengths": (of_lengths, STARTS),
    "to be added": (lambda n: torch.where(same(n), *map(double, (0.0, -torch.inf))), NUMBERS),
    "compared the other way": (lambda n: (lambda q, k: (k == q) & (q >= k))(*q_and_k(n)), NUMBERS),
}
STAY: dict[str, tuple[Any, torch.Tensor]] = {
    "causal alone": (lambda n: (lambda q, k: k <= q)(*q_and_k(n)), NUMBERS),
    "a window": (lambda n: same(n) & not_behind() & ~not_behind().tril(-4), NUMBERS),
    "what comes behind": (lambda n: same(n) & (not_behind().T), NUMBERS),
    "not itself": (lambda n: same(n) & (torch.arange(LENGTH)[None, :] < torch.arange(LENGTH)[:, None]), NUMBERS),
    "two kinds of numbers": (lambda n: same(n) & same(n // 2), NUMBERS),
    "other documents": (lambda n: ~same(n), NUMBERS),
    "a bias": (lambda n: torch.where(same(n), 0.0, -1e4).double(), NUMBERS),
    "something added": (lambda n: torch.where(same(n), 1.0, -torch.inf).double(), NUMBERS),
    "constants": (lambda n: same((torch.arange(LENGTH) // 5)[None]), NUMBERS),
    "by heads": (lambda n: same(n).expand(ROWS, 2, LENGTH, LENGTH) & (torch.arange(2)[:, None, None] >= 1), NUMBERS),
}  # fmt: skip


def program_of(
    name: str, masks: dict[str, tuple[Any, torch.Tensor]]
) -> tuple[nn.Module, Program, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    mask_of, numbers = masks[name]
    model = Masked(mask_of).double()
    x = torch.randn(ROWS, LENGTH, WIDTH).double()
    program = captured_program(model, zgraph.Plan(backend="eager"), (x, numbers), 1)
    cleanup()(program)
    return model, program, (x, numbers)


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_documents_is_recognised(name):
    _, program, _ = program_of(name, MASKS)
    assert packed_documents()(program) == {"attentions": 2}
    assert not any("attn_mask" in n.kwargs for n in program.nodes)
    large = [
        n
        for n in program.nodes
        if isinstance(v := n.meta.get("val"), torch.Tensor) and v.shape[-2:] == (LENGTH, LENGTH)
    ]
    assert large == []


@sweep("name", STAY, quick=5)
def test_any_other_mask_stays(name):
    _, program, _ = program_of(name, STAY)
    assert packed_documents()(program) == {"attentions": 0}
    assert any(n.kwargs.get("attn_mask") is not None for n in program.nodes)


ODD = {
    "in pieces": torch.tensor([[0, 1, 0, 1, 1, 0, 2, 2, 3, 2, 0, 0], [0] * 11 + [1]]),
    "each alone": torch.arange(24).reshape(2, 12),
    "all of one": torch.zeros(2, 12, dtype=torch.int64),
    "rows alike": torch.tensor([[1] * 5 + [2] * 7] * 2),
}
ODD_PLACES = {
    "descending": torch.tensor([[11 - i for i in range(12)], [0, 1, 2, 2, 1, 0, 0, 1, 2, 3, 4, 5]]),
    "equal": torch.zeros(2, 12, dtype=torch.int64),
}


@sweep("name", [*MASKS, *ODD, *ODD_PLACES], quick=6)
def test_it_is_computed_as_with_the_mask_whatever_the_numbers_are(name):
    if name in MASKS:
        mask_of, numbers = MASKS[name]
    else:
        mask_of, numbers = (
            (MASKS["numbers, causal"][0], ODD[name])
            if name in ODD
            else (
                # (places of one document: what does not come behind is by them)
                lambda n: (lambda q, k: (k <= q) & same(n * 0))(*q_and_k(n)),
                ODD_PLACES[name],
            )
        )
    torch.manual_seed(0)
    plain = Masked(mask_of).double()
    x = torch.randn(ROWS, LENGTH, WIDTH).double()
    mine = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(backend="eager"))
    losses = [model(x, numbers) for model in (mine, plain)]
    for loss in losses:
        loss.backward()
    assert torch.allclose(*losses, rtol=1e-13)
    for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-11, atol=1e-14)
    (step,) = mine.zgraph.programs.values()
    assert sum(n.target is PACKED for n in step.forward().program.graph.nodes) == 1


def llama(layers: int = 1) -> nn.Module:
    import transformers as t

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
    }
    return t.LlamaForCausalLM(t.LlamaConfig(**sizes, num_key_value_heads=2, use_cache=False))


def packed(lengths: list[list[int]], seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows of documents of these lengths; the first word of each is no target."""
    draw = torch.Generator().manual_seed(seed)
    places = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    words = torch.randint(1, 97, places.shape, generator=draw)
    return {"input_ids": words, "position_ids": places, "labels": words.masked_fill(places == 0, -100)}


def one_by_one(plain: nn.Module, batch: dict[str, torch.Tensor], lengths: list[list[int]]) -> torch.Tensor:
    """The loss of all documents, each run by itself; leaves its gradients."""
    count = int((batch["labels"][:, 1:] != -100).sum())
    total = torch.zeros(())
    for row, parts in enumerate(lengths):
        first = 0
        for n in parts:
            words = batch["input_ids"][row : row + 1, first : first + n]
            logits = plain(input_ids=words).logits[0]
            loss = F.cross_entropy(logits[:-1], words[0, 1:], reduction="sum") / count
            if n > 1:
                loss.backward()
                total += loss.detach()
            first += n
    return total


def apart(mine: nn.Module, plain: nn.Module) -> float:
    pairs = [
        (getattr(a.grad, "full_tensor", lambda a=a: a.grad)(), b.grad)
        for a, b in zip(mine.parameters(), plain.parameters(), strict=True)
    ]
    every = float(torch.stack([b.norm() for _, b in pairs]).norm())
    return max(float((a - b).norm()) / (float(b.norm()) + 0.03 * every) for a, b in pairs)


def rows_of(documents: int, rows: int, length: int) -> list[list[int]]:
    """Rows of one length, of so many documents in all."""
    draw = torch.Generator().manual_seed(documents)
    found = []
    for _ in range(rows):
        cuts = sorted((torch.randperm(length - 1, generator=draw)[: documents // rows - 1] + 1).tolist())
        found.append([b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True)])
    return found


@sweep(
    "backend, length",
    [pytest.param("inductor", 160, marks=pytest.mark.inductor), ("eager", 320), ("eager", 160)],
    quick=1,
)
def test_64_documents_in_4_rows_are_those_of_64_runs(backend, length):
    lengths = rows_of(64, 4, length)
    assert sum(map(len, lengths)) == 64
    plain, batch = llama(), packed(lengths)
    mine = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(backend=backend))
    loss = mine(**batch).loss
    loss.backward()
    assert torch.allclose(loss, one_by_one(plain, batch, lengths), rtol=2e-6)
    assert apart(mine, plain) < (2e-6 if backend == "eager" else 5e-6)
    (step,) = mine.zgraph.programs.values()
    for part in step.executables():
        values = [n.meta.get("val") for n in part.program.graph.nodes]
        assert not [v for v in values if isinstance(v, torch.Tensor) and v.shape[-2:] == (length, length)]


@pytest.mark.slow
def test_lengths_differ_in_one_program():
    plain = llama()
    mine = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(backend="eager"))
    for lengths in ([[5, 7], [4, 8]], [[9, 3, 20], [1, 1, 30], [2, 4, 26]]):
        batch = packed(lengths)
        for model in (mine, plain):
            model.zero_grad()
        mine(**batch).loss.backward()
        one_by_one(plain, batch, lengths)
        assert apart(mine, plain) < 2e-6
    assert len(mine.zgraph.programs) == 2


@sweep(
    "fields",
    [{"recompute": "full"}, {"offload": {"activations": "cpu"}}, {"tiles": {"loss": 2}}, {"precision": "bf16"}],
    quick=1,
    ids=str,
)
def test_the_rest_of_a_plan_works_with_it(fields):
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def forward(self, **batch):
            return self.model(**batch).loss

    plain, lengths = Loss(), [[5, 9], [14]]
    batch = packed(lengths)
    mine = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(backend="eager", **fields))
    loss = mine(**batch)
    loss.backward()
    known = one_by_one(plain.model, batch, lengths)
    if "precision" in fields:
        assert torch.allclose(loss.float(), known, rtol=2e-2)
    else:
        assert torch.allclose(loss, known, rtol=2e-6) and apart(mine, plain) < 2e-6


@pytest.mark.slow
def test_each_stage_of_a_pipeline_has_its_own():
    lengths = [[5, 9], [14], [3, 11], [7, 7]]
    plan = zgraph.Plan(mesh={"pp": 2}, micro_batches=2, backend="eager", partition=("model.layers.1",))
    with virtual_step(llama(layers=2), plan, 2, packed(lengths)) as virtual:
        pipeline = VirtualPipeline(virtual)
        assert all(difference.ok for difference in pipeline.differences)
        for step in pipeline.planned.steps:
            assert sum(n.target is PACKED for n in step.history().program.graph.nodes) == 1


FIELDS = {"tp": {"tensor_parallel": "auto"}, "cp": {"context_attention": "ring"}}


def on_ranks(mesh: dict[str, int], lengths: list[list[int]], backend: str) -> float:
    plain, batch = llama(), packed(lengths)
    fields = FIELDS.get(next(iter(mesh)), {})
    mine = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(mesh=mesh, backend=backend, zero=3, **fields))
    mine(**batch).loss.backward()
    one_by_one(plain, batch, lengths)
    step = next(iter(mine.zgraph.programs.values()))
    nodes = step.forward().program.graph.nodes
    assert sum(n.target is PACKED for n in nodes) == 1
    assert sum(n.target is BLOCK for n in nodes) == (mesh.get("cp", 1) - 1)
    return apart(mine, plain)


@pytest.mark.gloo
@sweep(
    "mesh, lengths, backend",
    [
        ({"dp": 2}, [[5, 9], [14]], "eager"),
        ({"tp": 2}, [[5, 9], [14]], "eager"),
        ({"cp": 2}, [[7, 7], [1, 13]], "inductor"),
        ({"cp": 4}, [[3, 7, 6], [16]], "eager"),
        ({"cp": 2}, [[5, 9], [14]], "eager"),
    ],
    quick=1,
    ids=str,
)
def test_on_ranks(two, four, mesh, lengths, backend):
    ranks = four if 4 in mesh.values() else two
    assert max(ranks.run(on_ranks, mesh, lengths, backend)) < 3e-6


@sweep("name", [*MASKS, "each alone", "in pieces"], quick=3)
@pytest.mark.parametrize("attention", ["ring", "heads"])
def test_ranks_have_parts_of_rows_of_documents(name, attention):
    mask_of, numbers = MASKS[name] if name in MASKS else (MASKS["numbers, causal"][0], ODD[name])
    torch.manual_seed(0)
    model = Masked(mask_of).double()
    x = torch.randn(ROWS, LENGTH, WIDTH).double()
    plan = zgraph.Plan(mesh={"cp": 2}, backend="eager", context_attention=attention)
    found = zgraph.verify(model, plan, 2, (x, numbers))
    assert found.ok, str(found)


class Grouped(nn.Module):
    """Attention of 4 heads of queries and 2 of keys, inside of documents or over the whole row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x, numbers):
        q, k, v = (
            y.unflatten(-1, (-1, 2)).transpose(1, 2) for y in self.inner(x).split((WIDTH, WIDTH // 2, WIDTH // 2), -1)
        )
        mask = None if numbers is None else same(numbers) & not_behind()
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return out.square().mean()


@sweep("numbers", [NUMBERS, None], quick=1, ids=["documents", "whole"])
def test_keys_of_fewer_heads_than_queries_go_around_the_ring(numbers):
    torch.manual_seed(0)
    plan = zgraph.Plan(mesh={"cp": 2}, backend="eager", context_attention="ring")
    found = zgraph.verify(Grouped().double(), plan, 2, (torch.randn(ROWS, LENGTH, WIDTH).double(), numbers))
    assert found.ok, str(found)


@sweep("causal", [False, True], quick=1)
def test_a_block_is_a_part_of_attention_with_its_mask(causal):
    draw = torch.Generator().manual_seed(1)
    q, k, v, grad = (torch.randn(2, 3, 9, 4, generator=draw, dtype=torch.float64) for _ in range(4))
    documents, others = (torch.randint(0, 4, (2, 9), generator=draw).sort(1).values for _ in range(2))
    order, other_order = (torch.randint(0, 20, (2, 9), generator=draw) for _ in range(2))
    shown = documents[:, None, :, None] == others[:, None, None, :]
    if causal:
        shown = shown & (other_order[:, None, None, :] <= order[:, None, :, None])
    sees = shown.any(-1).expand(2, 3, 9)
    asked = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = (asked[0] @ asked[1].mT / 2).masked_fill(~shown, -torch.inf)
    expected = (scores.softmax(-1).nan_to_num() @ asked[2]) * sees.unsqueeze(-1)
    places = (documents, others, order, other_order, causal, None)
    out, sums = BLOCK(q, k, v, *places)
    assert torch.allclose(out, expected) and bool((sums.isneginf() == ~sees).all())
    assert torch.allclose(sums[sees], scores.logsumexp(-1)[sees])
    if not causal:  # (a query that sees nothing in any block has no gradient; no mask of documents has one)
        grads = torch.autograd.grad((scores.softmax(-1).nan_to_num() @ asked[2])[sees].sum(), asked, allow_unused=True)
        finite = torch.where(sees, sums, 0.0)
        found = BLOCK_BACKWARD(torch.ones_like(grad), q, k, v, out, finite, *places)
        assert all(torch.allclose(a, b.nan_to_num()) for a, b in zip(found, grads, strict=True))

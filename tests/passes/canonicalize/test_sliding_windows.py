"""Attention whose own mask is a window of positions, beside the plain model, which computes all of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sweeps import sweep
from torch import nn
from torch.nn import functional as F

import zgraph
from zgraph.build.planned_step import programs
from zgraph.program import collectives
from zgraph.program.program import Program
from zgraph.program.sparse_attention import SPARSE, SPARSE_BACKWARD

WORDS, WIDTH, HEADS, LENGTH, WINDOW = 50, 16, 2, 1100, 128
BOUND = 2e-6  # of float32: sums of keys come in another order
MIN = torch.finfo(torch.float32).min

Mask = Callable[[torch.Tensor], torch.Tensor]


def places(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions of queries, [length, 1], and of keys, [length]."""
    each = torch.arange(seen.shape[1])
    return each[:, None], each


def compared(seen):
    q, k = places(seen)
    return (k <= q) & (k > q - WINDOW)


def by_distance(seen):
    q, k = places(seen)
    distance = q - k
    return (distance >= 0) & (distance < WINDOW)


def both_ways(seen):
    q, k = places(seen)
    return (k - q).abs() <= WINDOW // 2


def triangles(seen):
    return torch.ones(seen.shape[1], seen.shape[1], dtype=torch.bool).tril().triu(1 - WINDOW)


def added_triangles(seen):
    low = torch.full((seen.shape[1], seen.shape[1]), -torch.inf)
    return low.triu(1) + low.tril(-WINDOW)


def hidden(seen):
    q, k = places(seen)
    return torch.zeros(seen.shape[1], seen.shape[1]).masked_fill((k > q) | (q - WINDOW >= k), MIN)


def padded(seen):
    return compared(seen) & seen[:, None, None, :]


def in_documents(seen):
    documents = (~seen).cumsum(-1)
    return (documents[:, None, :, None] == documents[:, None, None, :]) & compared(seen)


def of_packed(positions):
    """Return transformers' mask without padding: positions are read by index, and begin again at each document."""
    length, every = positions.shape[1], torch.arange(1).view(1, 1, 1, 1)
    documents = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    q, k = ((every, torch.arange(length).view(shape)) for shape in ((1, 1, -1, 1), (1, 1, 1, -1)))
    shown = (positions[k] <= positions[q]) & (positions[k] > positions[q] - WINDOW)
    return shown & (documents[q] == documents[k])


def as_if_packed(seen):
    return of_packed(torch.arange(seen.shape[1])[None])


def one_document_more(seen):
    length = seen.shape[1]
    return of_packed(torch.cat([torch.arange(500), torch.arange(length - 500)])[None])


def sliced(seen):
    later = torch.arange(seen.shape[1] + 3)[3:]
    q, k = later[:, None] - 3, torch.arange(seen.shape[1])
    return (k <= q) & (k > q - WINDOW)


EXACT = {
    f.__name__: f for f in (compared, by_distance, both_ways, triangles, added_triangles, hidden, as_if_packed, sliced)
}
BESIDES = {f.__name__: f for f in (padded, in_documents)}


class Net(nn.Module):
    def __init__(self, mask: Mask, layers: int = 2) -> None:
        super().__init__()
        self.mask, self.words = mask, nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)]) for _ in range(layers)
        )

    def forward(self, words):
        x, mask = self.words(words), self.mask(words != 0)
        for qkv, out in self.layers:
            q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in qkv(x).chunk(3, -1))
            x = x + out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return x.square().mean()


def net(mask: Mask, layers: int = 2) -> Net:
    torch.manual_seed(0)
    return Net(mask, layers)


def words(length: int = LENGTH, rows: int = 2) -> torch.Tensor:
    return torch.randint(0, WORDS, (rows, length), generator=torch.Generator().manual_seed(length))


def after(model: nn.Module, *, length: int = LENGTH, **plan: Any) -> Program:
    return programs(model, zgraph.Plan(**({"backend": "eager"} | plan)), (words(length),), 1).after("sliding_windows")


def count(program: Program) -> int:
    return sum(n.target is SPARSE for n in program.nodes)


def farthest(plain: nn.Module, compiled: Any, call: torch.Tensor) -> float:
    expected, loss = plain(call), compiled(call)
    expected.backward()
    loss.backward()
    pairs = zip(plain.parameters(), compiled.parameters(), strict=True)
    differences = [(expected, loss), *((p.grad, q.grad) for p, q in pairs)]
    return max(float((a - b).detach().abs().max()) for a, b in differences)


@sweep("mask", list(EXACT | BESIDES), quick=4)
def test_a_window_is_computed_without_being_asked_and_gives_the_same_numbers(mask):
    plain = net((EXACT | BESIDES)[mask])
    compiled: Any = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(backend="eager"))
    assert farthest(plain, compiled, words()) < BOUND
    program = after(plain)
    targets = [n.target for n in program.nodes]
    assert targets.count(SPARSE) == targets.count(SPARSE_BACKWARD) == 2
    assert {n.args[3] is None for n in program.nodes if n.target is SPARSE} == {mask in EXACT}
    (remark,) = [str(r) for r in program.remarks if r.made_by == "sliding_windows"]
    assert "attention of 2 modules" in remark and "zgraph.Dense()" in remark
    whole = [n for n in program.nodes if getattr(n.meta.get("val"), "shape", ())[-2:] == (LENGTH, LENGTH)]
    assert bool(whole) == (mask not in EXACT)  # (the mask is not computed either)


@pytest.mark.slow
def test_inductor_gives_the_same_for_all_lengths():
    plain = net(compared)
    compiled: Any = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(shapes="dynamic"))
    for length in (LENGTH, 1333):
        assert farthest(plain, compiled, words(length)) < BOUND
        plain.zero_grad()
        compiled.zero_grad()
    assert len(compiled.zgraph.runtime.entries) == 1


def causal(seen):
    q, k = places(seen)
    return k <= q


def every_other(seen):
    q, k = places(seen)
    return compared(seen) & ((q - k) % 2 == 0)


def hides_itself(seen):
    q, k = places(seen)
    return (k < q) & (k > q - WINDOW)


def padded_by_a_number(seen):
    return torch.where(padded(seen), 0.0, MIN)


def wide(seen):
    q, k = places(seen)
    return (k <= q) & (k > q - 700)


def one_way_only(seen):
    q, k = places(seen)
    return k > q - WINDOW


def of_numbers(seen):
    numbers = seen.cumsum(-1)[:, None]
    return (numbers[..., None, :] <= numbers[..., None]) & (numbers[..., None, :] > numbers[..., None] - WINDOW)


def of_a_broadcast_row(seen):
    """One query's window for all queries."""
    q, k = places(seen)
    return ((k <= q) & (k > q - WINDOW))[600:601].expand(seen.shape[1], -1)


def of_wrapping_positions(seen):
    """Positions of 16 bits, of which the last come before the first."""
    each = torch.arange(seen.shape[1], dtype=torch.int16) + 32000
    return (each <= each[:, None]) & (each > each[:, None] - WINDOW)


def of_one_query(seen):
    """The window of a query whose position is cut out, for all queries."""
    q, k = torch.arange(seen.shape[1])[600:601, None], torch.arange(seen.shape[1])
    return ((k <= q) & (k > q - WINDOW)).expand(seen.shape[1], -1)


@pytest.mark.parametrize(
    "mask",
    [
        causal,
        hides_itself,
        padded_by_a_number,
        wide,
        one_way_only,
        of_numbers,
        of_a_broadcast_row,
        of_one_query,
        of_wrapping_positions,
        one_document_more,
    ],
    ids=lambda f: f.__name__,
)
def test_what_is_no_window_or_does_not_pay_stays_as_it_is(mask):
    assert count(after(net(mask, layers=1))) == 0


def test_a_mask_that_hides_more_holds_inside_of_the_window():
    plain = net(every_other)
    assert count(after(plain)) == 2
    assert farthest(plain, zgraph.compile(copy.deepcopy(plain), zgraph.Plan(backend="eager")), words()) < BOUND


def test_short_sequences_stay_as_they_are():
    assert count(after(net(compared, layers=1), length=1000)) == 0


def test_a_plan_says_no():
    program = after(net(compared, layers=1), attention={"*": zgraph.Dense()})
    assert count(program) == 0 and "sliding_windows" not in str(program.remarks)


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}, {"cp": 2}], ids=str)
def test_ranks_compute_the_same(mesh):
    result = zgraph.verify(net(compared, layers=1), zgraph.Plan(backend="eager", mesh=mesh), 2, (words(),))
    assert result.ok, result


@pytest.mark.slow
def test_in_a_ring_ranks_send_what_the_window_shows_of_their_keys():
    plan = zgraph.Plan(backend="eager", mesh={"cp": 2}, context_attention="ring")
    result = zgraph.verify(net(compared), plan, 2, (words(),))
    assert result.ok, result
    program = programs(net(compared), plan, (words(),), 2).after("divide_context")
    rows = {n.meta["val"].shape[2] for n in program.nodes if n.target is collectives.SHIFT}
    # The block of 32 from 544 on is in both ranks: the second reads its window, from 416 on, and the first its end.
    assert rows == {(550 - 416) + (576 - 550)}


@pytest.mark.slow
@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("name", ["mistral", "gemma3", "phi3"])
def test_models_of_transformers(name, use_cache):
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": WORDS}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 48, "sliding_window": WINDOW, "pad_token_id": 0}
    sizes |= {"use_cache": use_cache}
    torch.manual_seed(0)
    if name == "mistral":
        model, windows = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes)), 2
    elif name == "phi3":
        model, windows = transformers.Phi3ForCausalLM(transformers.Phi3Config(**sizes)), 2
    else:
        types = ["sliding_attention", "full_attention"]
        model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes, head_dim=8, layer_types=types))
        windows = 1
    ids = words(rows=1)
    plan = zgraph.Plan(backend="eager")
    program = programs(model, plan, {"input_ids": ids, "labels": ids}, 1).after("sliding_windows")
    assert count(program) == windows
    compiled: Any = zgraph.compile(copy.deepcopy(model), plan)
    mask = torch.ones_like(ids)
    mask[0, 900:] = 0
    for more in ({}, {"attention_mask": mask}):
        expected, result = (m(input_ids=ids, labels=ids, **more) for m in (model, compiled))
        expected.loss.backward()
        result.loss.backward()
        assert float((expected.logits - result.logits)[0, :900].detach().abs().max()) < 1e-5
        for p, q in zip(model.parameters(), compiled.parameters(), strict=True):
            if p.grad is not None:
                assert float((p.grad - q.grad).abs().max()) < 1e-5
        model.zero_grad()
        compiled.zero_grad()

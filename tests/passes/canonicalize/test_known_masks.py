"""Masks of attention that are known before anything runs."""

from __future__ import annotations

import pytest
import torch
from sweeps import product, sweep
from torch import nn
from torch.nn import functional as F

import zgraph
from zgraph.build.planned_step import captured_program
from zgraph.passes.canonicalize.cleanup import cleanup
from zgraph.passes.canonicalize.known_masks import known_masks
from zgraph.passes.canonicalize.sparse_attention import SparseOptions, sparse_attention
from zgraph.program.program import Program
from zgraph.program.sparse_attention import SPARSE

LENGTH, WIDTH = 12, 8


def places(rows: int, keys: int = LENGTH):
    return torch.arange(rows).unsqueeze(1), torch.arange(keys).unsqueeze(0)


def causal(length: int = LENGTH):
    q, k = places(length, length)
    return k <= q


def hidden(seen: torch.Tensor, by: float) -> torch.Tensor:
    return torch.where(seen, torch.zeros((), dtype=torch.float64), torch.full((), by, dtype=torch.float64))


def window():
    q, k = places(LENGTH)
    return (k <= q) & (k > q - LENGTH + 1)  # (the last query does not see the first key)


def one_more():
    q, k = places(LENGTH)
    return (k <= q) | ((q == 3) & (k == 4))


class Masked(nn.Module):
    """Attention with a mask that the model makes itself, of the input's shape or of constants."""

    def __init__(self, made, keys: int = LENGTH) -> None:
        super().__init__()
        self.inner, self.made, self.keys = nn.Linear(WIDTH, WIDTH), made, keys

    def forward(self, x):
        q = self.inner(x).unflatten(-1, (2, -1)).transpose(1, 2)
        k = q[:, :, : self.keys]
        return F.scaled_dot_product_attention(q, k, k, attn_mask=self.made()).square().mean()


class Given(Masked):
    def forward(self, x, mask):
        q = self.inner(x).unflatten(-1, (2, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).square().mean()


def program_of(model: nn.Module, *inputs: torch.Tensor) -> Program:
    torch.manual_seed(0)
    x = torch.randn(2, LENGTH, WIDTH).double()
    program = captured_program(model.double(), zgraph.Plan(backend="eager"), (x, *inputs), 1)
    cleanup()(program)
    return program


def attention(program: Program) -> list:
    return [n for n in program.nodes if "attention" in str(n.target)]


KNOWN = {
    "booleans": (causal, "causal"),
    "a batch of them": (lambda: causal().expand(2, 1, LENGTH, LENGTH), "causal"),
    "infinities": (lambda: hidden(causal(), -torch.inf), "causal"),
    "the least number": (lambda: hidden(causal(), torch.finfo(torch.float64).min), "causal"),
    "a triangle": (lambda: torch.ones(LENGTH, LENGTH).tril().bool(), "causal"),
    "everything": (lambda: torch.ones(LENGTH, LENGTH).bool(), "none"),
    "one for all": (lambda: torch.ones(1, 1).bool(), "none"),
    "one of two pieces": (lambda: torch.cat([causal(), causal()], 1).chunk(2, 1)[0], "causal"),
    "one range for both": (lambda: (lambda a: a[None] <= a[:, None])(torch.arange(LENGTH)), "causal"),
    "nothing is added": (lambda: torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.float64), "none"),
}
OTHERS = {
    "a window": window,
    "one more": one_more,
    "a bias": lambda: hidden(causal(), -1e4),
    "one row less": lambda: causal() & (torch.arange(LENGTH) != 0).unsqueeze(1) | causal().flip(0),
    "one of a batch": lambda: torch.stack([causal(), causal() | (torch.arange(LENGTH) < 2)]).unsqueeze(1),
}


@product("at_once, name", [2**24, 30], KNOWN, together=1)
def test_a_mask_that_is_known_is_left_out_of_the_forward_and_the_backward(monkeypatch, name, at_once):
    made, kind = KNOWN[name]
    program = program_of(Masked(made))
    assert all(n.kwargs.get("attn_mask") is not None for n in attention(program)) and len(attention(program)) == 2
    monkeypatch.setattr("zgraph.passes.canonicalize.known_masks.AT_ONCE", at_once)
    counts = known_masks()(program)
    assert counts == {"causal": 0, "none": 0} | {kind: 2}
    assert not any("attn_mask" in n.kwargs for n in attention(program))
    names = [[a.name for a in n.target._schema.arguments].index("is_causal") for n in attention(program)]
    assert {n.args[at] if at < len(n.args) else False for n, at in zip(attention(program), names, strict=True)} == {
        kind == "causal"
    }


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_mask_stays(name):
    program = program_of(Masked(OTHERS[name]))
    assert not any(known_masks()(program).values())
    assert all(n.kwargs.get("attn_mask") is not None for n in attention(program))


@pytest.mark.parametrize("name", ["booleans", "infinities", "everything", "the least number"])
def test_of_sparse_attention_a_mask_hides_by_infinity(name):
    """By any other number a query that sees no key but hidden ones would see all of them."""
    program = program_of(Masked(KNOWN[name][0]))
    sparse_attention(SparseOptions((("*", zgraph.LocalWindow(block=8)),)))(program)
    kind = None if name == "the least number" else KNOWN[name][1]
    assert known_masks()(program) == {"causal": 0, "none": 0} | ({kind: 2} if kind else {})
    masks = [n.args[3 if n.target is SPARSE else 6] for n in attention(program)]
    causal = [n.args[4 if n.target is SPARSE else 7] for n in attention(program)]
    assert [m is None for m in masks] == 2 * [kind is not None] and causal == 2 * [kind == "causal"]


def test_a_mask_that_is_too_large_to_be_looked_at_stays_and_says_so(monkeypatch):
    program = program_of(Masked(KNOWN["a triangle"][0]))
    monkeypatch.setattr("zgraph.passes.canonicalize.known_masks.AT_ONCE", 30)
    monkeypatch.setattr("zgraph.passes.canonicalize.known_masks.WHOLE", 30)
    assert not any(known_masks()(program).values())
    (remark,) = program.remarks
    assert "a mask of 12 x 12" in remark.what and "is_causal=True" in remark.remedy


def test_fewer_keys_than_queries_are_not_causal():
    program = program_of(Masked(lambda: causal()[:, :8], keys=8))
    assert not any(known_masks()(program).values())


def test_a_mask_that_is_given_or_drawn_stays():
    assert not any(known_masks()(program_of(Given(None), causal())).values())
    drawn = program_of(Masked(lambda: torch.rand(LENGTH, LENGTH) < 2))
    assert not any(known_masks()(drawn).values())


@sweep(
    "name,way",
    [
        *((name, way) for name in ("booleans", "infinities", "everything", "one for all") for way in ("heads", "ring")),
        ("a window", "heads"),
    ],
    quick=4,
)
def test_parts_of_the_sequence_give_what_the_whole_gives_with_the_mask(name, way):
    made = KNOWN[name][0] if name in KNOWN else OTHERS[name]
    torch.manual_seed(0)
    plan = zgraph.Plan(mesh={"cp": 2}, zero=0, backend="eager", context_attention=way)
    found = zgraph.verify(Masked(made).double(), plan, 2, (torch.randn(2, LENGTH, WIDTH).double(),))
    assert found.ok, str(found)

"""Gradients of a table's rows that are added to its other gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zgraph
from zgraph.build.planned_step import captured_program
from zgraph.passes.canonicalize.add_rows import add_rows
from zgraph.passes.canonicalize.cleanup import cleanup

ROWS, WIDTH = 23, 6
PUTS = ("index_put", "masked_index_put")


class Tied(nn.Module):
    """A table that gives the inputs of a model, and its classes."""

    def __init__(self, padding: int | None = None, by_frequency: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, padding_idx=padding, scale_grad_by_freq=by_frequency)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, words):
        logits = F.linear(self.inner(self.table(words)).tanh(), self.table.weight)
        return F.cross_entropy(logits.flatten(0, 1), words.roll(1, 1).flatten())


class Twice(nn.Module):
    """A table that is looked up twice, by indices of two and of one dimension, and is punished as well."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self, words):
        one, other = self.table[words], F.embedding(words[0], self.table)
        return (one.square().mean(1) * other.sum()).sum() + self.table.square().sum()


class Written(nn.Module):
    """A sum with rows of zeros that is the model's own, in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self, words):
        own = torch.zeros(ROWS, WIDTH).index_put((words.flatten(),), torch.ones(words.numel(), WIDTH), accumulate=True)
        return (self.table + own).square().mean()


class Rows(nn.Module):
    """A table that is looked up twice and has no other gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)

    def forward(self, words):
        return (self.table(words) * self.table(words.flip(1)).sin()).sum()


class Often(nn.Module):
    """A table of which one row is looked up very often, with small gradients, and is punished, with large ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)

    def forward(self, words):
        return self.table(words).mean(1).sin().mean() + self.table.weight.square().sum()


MODELS = {
    # what makes the model, and how many sums it has with rows
    "tied": (Tied, 1),
    "tied, with padding": (lambda: Tied(padding=2), 1),
    "tied, scaled by frequency": (lambda: Tied(by_frequency=True), 1),
    "looked up twice": (Twice, 2),
    "the model's own sum": (Written, 0),
}


def words() -> torch.Tensor:
    """Return indices of which some occur often, and some never."""
    return torch.tensor([[2, 5, 5, 5, 0, 7], [5, 22, 2, 2, 1, 5]])


def zeros_of(program) -> int:
    """Return how many lookups put the rows of their gradients into a table of zeros."""
    puts = [n for n in program.graph.nodes if any(name in str(n.target) for name in PUTS)]
    return sum(n.args[0].target is torch.ops.aten.full.default and n.args[0].args[0] == [ROWS, WIDTH] for n in puts)


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_added_to_the_other_gradient(name):
    made, count = MODELS[name]
    program = captured_program(made(), zgraph.Plan(), (words(),), 1)
    cleanup()(program)
    before = zeros_of(program)
    assert add_rows()(program) == {"added": count}
    assert zeros_of(program) == before - count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_only_an_exact_dtype_is_added_to(dtype):
    program = captured_program(Tied().to(dtype), zgraph.Plan(), (words(),), 1)
    cleanup()(program)
    assert add_rows()(program) == {"added": int(dtype is torch.float64)}


def test_more_rows_than_the_table_has_are_added_to_rows_alone():
    many = words().repeat(1, 4)
    for made, count in ((Tied, 0), (Rows, 1)):
        program = captured_program(made(), zgraph.Plan(), (many,), 1)
        cleanup()(program)
        assert add_rows()(program) == {"added": count}


@pytest.mark.inductor
def test_a_row_that_occurs_often_is_as_exact_as_in_plain_pytorch():
    torch.manual_seed(0)
    plain = Often()
    model = zgraph.compile(copy.deepcopy(plain), zgraph.Plan())
    exact = copy.deepcopy(plain).double()
    often = torch.zeros(64, 512, dtype=torch.long)
    for one in (plain, model, exact):
        one(often).backward()
    wanted = exact.table.weight.grad[0]
    off, allowed = ((one.table.weight.grad[0] - wanted).norm() for one in (model, plain))
    assert off <= 2 * allowed


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_plain_pytorch(name):
    torch.manual_seed(0)
    plain = MODELS[name][0]()
    model = zgraph.compile(copy.deepcopy(plain), zgraph.Plan())
    for step in range(2):
        for one in (plain, model):
            one(words().roll(step, 1)).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            # (float32: 2**-24 for each of up to 40 terms of a sum, of gradients up to 60)
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-6, atol=2e-6)

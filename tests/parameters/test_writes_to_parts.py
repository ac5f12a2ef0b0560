"""Writes to parts of divided tensors are those of plain PyTorch, or refused; torch loses those to what it gathers for a view."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks, kept
from torch import nn

import zgraph
from zgraph.errors import ModelError
from zgraph.torch_compat import writes_to_parts
from zgraph.torch_compat.operators_of_shards import table

Write = Callable[[Any], Any]
LOST: dict[str, Write] = {
    "a row": lambda w: w[2].fill_(5.0),
    "a row of the other rank": lambda w: w[-1].zero_(),
    "rows": lambda w: w[2:5].add_(1),
    "an element": lambda w: w.__setitem__((2, 3), 1.0),
    "rows set": lambda w: w.__setitem__(slice(1, 3), 0),
    "a diagonal": lambda w: w.diagonal().add_(1),
    "a chunk": lambda w: w.chunk(2)[0].mul_(0),
    "a piece": lambda w: w.split(3)[1].copy_(torch.ones(())),
    "of its data": lambda w: w.data[2].add_(1),
    "detached": lambda w: w[2].detach().fill_(1),
    "a view of a view": lambda w: w[2].view(7, 1)[3:].fill_(1),
    "by chance": lambda w: nn.init.normal_(w[2]),
    "several at once": lambda w: torch._foreach_mul_([w[1], w[2]], 2.0),
    "of a value": lambda w: (w * 2)[1].add_(1),
}
KEPT: dict[str, Write] = {
    "a column": lambda w: w[:, 2].add_(1),
    "a column set": lambda w: w.__setitem__((slice(None), 2), 5),
    "all set": lambda w: w.__setitem__(slice(None), 5),
    "transposed": lambda w: w.t()[2].mul_(3),
    "of a copy": lambda w: w.add_(w[2].clone().fill_(1).sum()),
    "read and written": lambda w: w.mul_(w[1:3].sum()),
    "an identity": lambda w: nn.init.eye_(w),
    "by a mask": lambda w: w.masked_fill_(w > 0, 2.0),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 3))


def compiled(zero: int) -> Any:
    """The model with its first weights, compiled once for all writes of a file."""
    if zero not in kept:
        made = zgraph.compile(model(), zgraph.Plan(zero=zero, optimizer=zgraph.SGD(lr=0.1), backend="eager"))
        kept[zero] = made, [p.detach().clone() for p in made.parameters()]
    made, first = kept[zero]
    with torch.no_grad():
        for p, value in zip(made.parameters(), first, strict=True):
            p.copy_(value)
    made.zero_grad()
    return made


def written(write: Write, zero: int | None) -> torch.Tensor:
    made: Any = model() if zero is None else compiled(zero)
    x = torch.arange(14.0).reshape(2, 7)
    made(x).sum().backward()
    weight = dict(made.named_parameters())["0.weight"]
    with torch.no_grad():
        write(weight)
        made(x)
    return weight.detach().full_tensor() if zero is not None else weight.detach()


def refused(kinds: list[str]) -> list[str]:
    found = []
    for kind in kinds:
        compiled(3)  # (nothing is refused of a write before)
        try:
            written(LOST[kind], 3)
        except ModelError as error:
            if "writes to a part of a tensor that is divided" in str(error) and "full_weights" in str(error):
                found.append(kind)
    return found


@pytest.mark.gloo
def test_a_write_that_would_be_lost_is_refused(two: Ranks) -> None:
    assert two.run(refused, list(LOST)) == [list(LOST)] * 2


def differing(kinds: list[str], zero: int) -> list[str]:
    return [kind for kind in kinds if not torch.equal(written(KEPT[kind], zero), written(KEPT[kind], None))]


@pytest.mark.gloo
@pytest.mark.parametrize("zero", [0, 3])
def test_other_writes_are_those_of_plain_pytorch(two: Ranks, zero: int) -> None:
    assert two.run(differing, list(KEPT), zero) == [[], []]


def whole() -> bool:
    made = zgraph.compile(model(), zgraph.Plan(zero=3, optimizer=zgraph.SGD(lr=0.1), backend="eager"))
    made(torch.ones(2, 7)).sum().backward()
    with zgraph.full_weights(made, write=True), torch.no_grad():
        dict(made.named_parameters())["0.weight"][2].fill_(5.0)
    row = dict(made.named_parameters())["0.weight"].full_tensor()[2]
    return bool((row == 5.0).all())


@pytest.mark.gloo
def test_the_way_out_works(two: Ranks) -> None:
    assert two.run(whole) == [True, True]


def looked_at() -> tuple[bool, bool]:
    """Whether writes are looked at while a copy is there, and after the next one behind it."""
    made = zgraph.compile(model(), zgraph.Plan(zero=3, optimizer=zgraph.SGD(lr=0.1), backend="eager"))
    made(torch.ones(2, 7)).sum().backward()
    weight = dict(made.named_parameters())["0.weight"]
    with torch.no_grad():
        rows = weight[1:3]
        weight.add_(1)
        before = any(treatment is writes_to_parts._write for treatment in table().values())
        del rows
        gc.collect()
        weight.add_(1)
    return before, any(treatment is writes_to_parts._write for treatment in table().values())


@pytest.mark.gloo
def test_writes_are_torchs_own_when_no_copy_is_left(two: Ranks) -> None:
    assert two.run(looked_at) == [(True, False)] * 2

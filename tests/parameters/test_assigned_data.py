"""`weight.data = …` of a divided weight changes nothing, and is an error at the next use; in-place operators do what they say."""

from __future__ import annotations

import copy

import pytest
import torch
from ranks import Ranks
from torch import nn
from torch.distributed.tensor import DTensor

import zgraph
from zgraph.errors import ModelError


def averaged(zero: int) -> tuple[list[float], str]:
    """(what a moving average of a model gives, beside the trained one's loss; what is said where `.data` is assigned)."""
    plan = zgraph.Plan(backend="eager", zero=zero)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    average = zgraph.compile(copy.deepcopy(model).requires_grad_(False), plan)
    model = zgraph.compile(model, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, x = [], torch.ones(2, 3)
    average(x)
    average.to("cpu")  # (gives the parameters other DTensors)
    for _ in range(3):
        loss = (model(x) - average(x)).square().mean() + model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for own, other in zip(average.parameters(), model.parameters(), strict=True):
                own.mul_(0.9).add_(other, alpha=0.1)
        found.append(loss.item())
    for own, other in zip(average.parameters(), model.parameters(), strict=True):
        own.data = own.data * 0.9 + other.data * 0.1
    if not isinstance(average.weight, DTensor):
        average(x)
        return found, ""
    with pytest.raises(ModelError, match=r"weight\.data was assigned") as caught:
        average(x)
    return found, str(caught.value)


@pytest.mark.gloo
@pytest.mark.parametrize("zero", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_an_assignment_that_a_shard_does_not_see_is_an_error(two: Ranks, zero: int):
    expected, said = averaged(zero)
    assert not said
    for found, said in two.run(averaged, zero):
        assert found == pytest.approx(expected, rel=1e-5) and "weight.copy_(value)" in said

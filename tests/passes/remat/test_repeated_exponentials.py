"""A softmax that is written out has exponentials for its sum and others for its result on CPU, where Inductor would store them; numbers stay."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import zgraph
from zgraph.build.planned_step import programs
from zgraph.program.node import Phase, info
from zgraph.program.program import Program

aten = torch.ops.aten


class Written(nn.Module):
    """Attention whose softmax is written out; its scores are a product, which nobody recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.project(x)
        return (q @ q.mT).softmax(-1) @ q


class Normaliser(nn.Module):
    """The logarithm of a sum of exponentials, which nothing else reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.logsumexp(-1)


def forward_exponentials(model: nn.Module, **plan: str) -> list[torch.fx.Node]:
    program: Program = programs(model, zgraph.Plan(**plan), (torch.randn(2, 8, 16, requires_grad=True),), 1).program
    nodes = [n for n in program.graph.nodes if n.target is aten.exp.default]
    return [n for n in nodes if info(n).phase is Phase.FORWARD]


def test_a_sum_has_exponentials_of_its_own() -> None:
    one, summed = forward_exponentials(Written())
    assert one.args == summed.args and info(summed).made_by == "recompute"
    assert [u.target for u in summed.users] == [aten.sum.dim_IntList]
    assert all(u.target is not aten.sum.dim_IntList for u in one.users) and one.users


def test_exponentials_with_one_reader_and_those_of_eager_stay() -> None:
    assert len(forward_exponentials(Normaliser())) == 1
    assert forward_exponentials(Written(), backend="eager") == []  # (softmax is one operator there)
    assert len(forward_exponentials(Written(), recompute="none")) == 1


@pytest.mark.inductor
def test_numbers_are_those_of_plain_pytorch() -> None:
    """By norm: these scores reach 100, so single elements of gradients cancel."""
    torch.manual_seed(0)
    model, x = Written(), 3 * torch.randn(2, 40, 16)  # (40: a vector of 16 and a rest)
    exact = copy.deepcopy(model).double()
    compiled = zgraph.compile(model, zgraph.Plan())
    results = [exact(x.double()), compiled(x)]
    for result in results:
        result.square().sum().backward()
    wanted, actual = [
        [r.detach(), *(p.grad for p in m.parameters())] for r, m in zip(results, (exact, compiled), strict=True)
    ]
    for one, other in zip(wanted, actual, strict=True):
        assert float((other.double() - one).norm() / one.norm()) < 1e-5

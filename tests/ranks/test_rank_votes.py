"""What ranks of one model must have alike is made so when it is compiled, with a warning: parameters and buffers are rank 0's, as in DDP."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import zgraph
from zgraph.errors import RankMismatchError

pytestmark = pytest.mark.gloo

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


class Random(nn.Module):
    """Every rank draws its own tables, of all kinds of dtypes and strides; one is no part of checkpoints."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        for number, dtype in enumerate(DTYPES):
            self.register_buffer(f"table{number}", torch.randn(4, 8).mul(3).to(dtype), persistent=number % 2 == 0)
        self.register_buffer("turned", torch.randn(8, 4).t())
        self.register_buffer("expanded", torch.randn(4, 1).expand(4, 8))
        self.register_buffer("number", torch.randn(()))
        self.register_buffer("none", None)
        self.out = nn.Linear(8, 1)
        self.turned_weight = nn.Parameter(torch.randn(8, 4).t())

    def forward(self, x):
        hidden = x @ (self.table0 + self.turned + self.expanded + self.turned_weight) * self.number
        return self.out(hidden.relu()).pow(2).mean()


def tables():
    """This rank's buffers and parameters after compile, and what was logged."""
    rank, said = torch.distributed.get_rank(), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zgraph").addHandler(handler)
    try:
        model = zgraph.compile(Random(rank), zgraph.Plan(backend="eager", mesh={"dp": 2}))
    finally:
        logging.getLogger("zgraph").removeHandler(handler)
    parameters = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
    return dict(model.named_buffers()) | parameters, said


def test_buffers_that_differ_become_those_of_rank_0(two):
    expected = Random(0)
    expected = dict(expected.named_buffers()) | dict(expected.named_parameters())
    first, second = two.run(tables)
    for found, _ in (first, second):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value.detach()), name
    assert any("differ between ranks" in line for line in first[1])


class Other(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.register_buffer("table", table)
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        return self.out(x).mean()


def refused():
    try:
        zgraph.compile(
            Other(torch.eye(4)[: 3 + torch.distributed.get_rank()]), zgraph.Plan(backend="eager", mesh={"dp": 2})
        )
    except RankMismatchError as error:
        return str(error)
    return "nothing"


def test_buffers_that_can_not_be_made_equal_are_refused_on_all_ranks(two):
    assert all("ranks disagree about the model's tensors" in text for text in two.run(refused))

"""Sums into chosen rows (an embedding's gradient, say) in kernels that Inductor tiles over two dimensions are right, and write nowhere else."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from sweeps import sweep
from torch import nn

import zgraph


class Sums(nn.Module):
    """An embedding's gradient of what is stored by columns: a kernel over columns and rows that adds to rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(6, 16)), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + x.sort(1)[0]
        h = h + F.embedding((h[:, 0].detach() * 4).long().remainder(6), self.table)
        return self.head(h).square().mean()


@pytest.mark.inductor
@sweep("threads", [1, 2], quick=1)
def test_sums_into_rows_of_what_is_stored_by_columns_are_plain_pytorchs(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        plain = Sums()
        model = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(backend="inductor"))
        for _ in range(4):
            x = torch.randn(16, 4).t()
            grads = []
            for side in (plain, model):
                given = x.detach().requires_grad_()
                side.zero_grad()
                side(given).backward()
                grads.append([given.grad, side.table.grad, side.head.weight.grad])
            for mine, theirs in zip(*grads, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    finally:
        torch.set_num_threads(before)

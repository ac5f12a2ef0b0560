"""An input whose values decide may be given under two names, as `input_ids=ids, labels=ids`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zgraph
from zgraph.errors import CaptureError


class Decides(nn.Module):
    """Repeats rows as often as the counts say."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(3, 2)

    def forward(self, x, counts, again):
        return self.line(x.repeat(int(counts[0]), 1)).sum() * again.sum()


class Branches(Decides):
    """Looks at a value that is computed of a weight."""

    def forward(self, x, counts, again):
        return super().forward(x, counts, again) if self.line.weight.sum() > 100 else self.line(x).sum()


def test_it_is_one_value():
    plain, mine = Decides(), zgraph.compile(Decides(), zgraph.Plan(backend="eager"))
    x = torch.randn(2, 3)
    for n in (2, 3):
        counts = torch.tensor([n, 1])
        assert torch.equal(mine(x, counts, counts), plain(x, counts, counts))
        assert torch.equal(mine(x, counts, counts.clone()), plain(x, counts, counts))


def test_a_model_that_can_not_be_captured_says_so():
    mine = zgraph.compile(Branches(), zgraph.Plan(backend="eager"))
    counts = torch.tensor([2, 1])
    with pytest.raises(CaptureError, match="captured as one graph"):
        mine(torch.randn(2, 3), counts, counts)

"""Models whose programs depend on the lengths that they are called with."""

from __future__ import annotations

from torch import nn


class Branches(nn.Module):
    """Takes one layer for short rows and another for long ones."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return (self.short if x.shape[1] <= 10 else self.long)(x).square().mean()

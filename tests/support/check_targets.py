"""Models with faults that a check should find."""

from __future__ import annotations

import torch
from cli_targets import Regressor
from torch import nn


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4, sparse=True)
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        return self.out(self.words(x)).sum()


class Selecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        return self.out(x[x.sum(1) > 0]).sum()


class Unused(nn.Module):
    """A layer that nothing depends on, and an output that is no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x):
        return self.used(x)


class Wide(nn.Module):
    """Takes some megabytes, most of them activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def sparse():
    return Sparse(), (torch.zeros(4, dtype=torch.int64),)


def selecting():
    return Selecting(), (torch.ones(4, 4),)


def unused():
    return Unused(), (torch.randn(4, 6),)


def frozen():
    model, inputs = Regressor().requires_grad_(False), (torch.randn(4, 6), torch.randn(4, 3))
    return model, inputs


def infinite():
    model = Regressor()
    with torch.no_grad():
        model.first.weight[0, 0] = 1e6
    return model, (torch.randn(4, 6), torch.randn(4, 3))


def wide():
    return Wide(), (torch.randn(8192, 32),)


def raising():
    class Raising(nn.Linear):
        def forward(self, x):
            raise LookupError("no such word")

    return Raising(2, 2), (torch.ones(2),)


def policy(node):
    return True

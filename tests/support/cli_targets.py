"""Targets, good and bad, and a pass, for the tests of the command line."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from zgraph.passes import graph_pass
from zgraph.program.node import NodeInfo, Phase
from zgraph.program.program import OutputRole


class Regressor(nn.Module):
    """Mean squared error of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.second = nn.Linear(10, 3)

    def forward(self, x, y):
        return F.mse_loss(self.second(torch.tanh(self.first(x))), y)


def factory():
    torch.manual_seed(0)
    return Regressor(), (torch.randn(4, 6), torch.randn(4, 3))


def one_row():
    model, (x, y) = factory()
    return model, (x[:1], y[:1])


def branching():
    """A model that can't be captured whole."""

    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 1)

        def forward(self, x):
            out = self.layer(x).sum()
            return out if out > 0 else -out

    return Branching(), (torch.randn(4, 6),)


def failing():
    raise ValueError("no weights today")


def only_model():
    return Regressor()


not_callable = 3


@graph_pass("double_gradients", "makes every gradient wrong", requires=("regathered",))
def double_gradients(program):
    items = []
    for port, node in program.output_items():
        if port.role is OutputRole.GRADIENT:
            with program.graph.inserting_before(program.output_node()):
                record = NodeInfo(Phase.BACKWARD, made_by="double_gradients")
                node = program.call(torch.ops.aten.mul.Tensor, (node, 2), record, name="doubled")
        items.append((port, node))
    program.set_outputs(items)


@graph_pass("false_dtypes", "records another dtype of every gradient", requires=("regathered",))
def false_dtypes(program):
    for port, node in program.output_items():
        if port.role is OutputRole.GRADIENT:
            node.meta["val"] = node.meta["val"].to(torch.float64)


class Chain(nn.Module):
    """Equal layers, and nothing else."""

    def __init__(self, layers: int, dim: int = 64) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(dim))  # (the first layer has a gradient to give back, as all others)
        self.layers = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(layers))

    def forward(self, x):
        x = x + self.shift
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


def chain():
    with torch.device("meta"):
        return Chain(8), (torch.zeros(8, 64),)


def deadlock(ranks, stages, micro_batches):
    """A schedule whose first stage waits for a gradient before it has run forward what that is of."""
    rows = [
        [f"{s}F{m}" for m in range(micro_batches)] + [f"{s}B{m}" for m in range(micro_batches)] for s in range(stages)
    ]
    rows[-1] = [f"{stages - 1}{kind}{m}" for m in reversed(range(micro_batches)) for kind in "FB"]
    return [
        ["0F0", "0B0", *[f"0F{m}" for m in range(1, micro_batches)], *[f"0B{m}" for m in range(1, micro_batches)]],
        *rows[1:],
    ]

"""Values that are looked up once and read by several layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import zgraph

HEADS, LENGTH, WIDTH = 2, 8, 16
pytestmark = pytest.mark.inductor


class Biased(nn.Module):
    """Layers of attention that add one bias, looked up by distance, as T5 has it."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.bias = nn.Embedding(2 * LENGTH, HEADS)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x):
        at = torch.arange(LENGTH)
        bias = self.bias(at[None, :] - at[:, None] + LENGTH).permute(2, 0, 1)[None].contiguous()
        for layer in self.layers:
            heads = layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            scores = heads @ heads.transpose(2, 3) + bias
            x = x + (scores.softmax(-1) @ heads).transpose(1, 2).flatten(2)
        return x.square().mean()


def compiled(layers: int) -> tuple[nn.Module, nn.Module]:
    """Return a plain model and a compiled copy."""
    torch.manual_seed(0)
    plain = Biased(layers)
    return plain, zgraph.compile(copy.deepcopy(plain), zgraph.Plan(recompute="none"))


def lookups(model: nn.Module) -> int:
    """Return how often kernels of the forward look up the bias."""
    (entry,) = model.zgraph.runtime.entries.values()
    return sum(kernel.calls for kernel in entry.program().forward().kernels if "embedding" in kernel.operators)


@pytest.mark.parametrize(("layers", "count"), [(2, 2), (4, 1)])
def test_what_many_layers_read_is_looked_up_once(layers, count):
    plain, model = compiled(layers)
    x = torch.randn(3, LENGTH, WIDTH)
    mine, theirs = model(x), plain(x)
    mine.backward()
    theirs.backward()
    assert lookups(model) == count
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)

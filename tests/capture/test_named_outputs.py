"""Outputs in torch's named tuples carry gradients as plain PyTorch's do."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import zgraph

Pair = namedtuple("Pair", "first second")

FORWARDS = {
    "slogdet": lambda w: torch.linalg.slogdet(w),
    "qr": lambda w: torch.linalg.qr(w),
    "max": lambda w: torch.max(w, 0),
    "nested": lambda w: {"a": torch.sort(w), "b": [torch.linalg.slogdet(w)]},
    "namedtuple": lambda w: Pair(torch.linalg.slogdet(w).sign, w * 2),
}


class Of(nn.Module):
    def __init__(self, of):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)) + 3 * torch.eye(3))
        self.of = of

    def forward(self):
        return FORWARDS[self.of](self.w)


@pytest.mark.parametrize("of", FORWARDS)
def test_the_outputs_of_a_named_tuple_have_gradients(of):
    plain, model = Of(of), zgraph.compile(Of(of), zgraph.Plan(backend="eager"))
    found = []
    for m in (plain, model):
        output = m()
        leaves = pytree.tree_leaves(output)
        sum(x.sum() for x in leaves if x.requires_grad).backward()
        found.append((type(output), [x.requires_grad for x in leaves], leaves, m.w.grad))
    (kind, flags, values, grad), (kind2, flags2, values2, grad2) = found
    assert (kind, flags) == (kind2, flags2)
    torch.testing.assert_close(values, values2)
    torch.testing.assert_close(grad, grad2)

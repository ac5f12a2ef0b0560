"""A recompute policy may keep any operator, one with several outputs too: its outputs are kept with it."""

from __future__ import annotations

import pytest
import torch
from sweeps import sweep
from torch import nn
from torch.nn import functional as F

import zgraph
from zgraph.build.planned_step import programs
from zgraph.program.node import info


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.first, self.head = (
            nn.Embedding(32, 16),
            nn.LayerNorm(16),
            nn.Linear(16, 48),
            nn.Linear(16, 32),
        )

    def forward(self, words):
        rows, length = words.shape
        q, k, v = self.first(self.norm(self.embed(words))).view(rows, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(torch.tanh(mixed)).flatten(0, 1), words.flatten())


def keep_attention(node):
    return "attention" not in str(node.target)


def keep_norm(node):
    return "layer_norm" not in str(node.target)


def keep_loss(node):
    return "nll_loss" not in str(node.target)


def step(backend, **options):
    torch.manual_seed(0)
    model = zgraph.compile(Attention(), zgraph.Plan(backend=backend, **options))
    loss = model(torch.randint(32, (4, 8)))
    loss.backward()
    return [loss, *(p.grad for p in model.parameters())]


@sweep("policy", ["keep_attention", "keep_norm", "keep_loss"], quick=1)
def test_an_operator_with_several_outputs_is_kept_with_them(policy):
    plain, other = step("eager"), step("eager", recompute=f"{__name__}:{policy}")
    assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))
    plan = zgraph.Plan(backend="eager", recompute=f"{__name__}:{policy}")
    again = [
        n
        for n in programs(Attention(), plan, (torch.randint(32, (4, 8)),), 1).program.nodes
        if info(n).copy_of is not None
    ]
    assert again and all(globals()[policy](n) for n in again)


@pytest.mark.slow
def test_inductor_keeps_them_too():
    plain, other = step("eager"), step("inductor", recompute=f"{__name__}:keep_norm")
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(plain, other, strict=True))

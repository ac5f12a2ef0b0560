"""Recurrent layers drop values between them, as in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from sweeps import sweep
from torch import nn

import zgraph
from zgraph.torch_compat.inductor_code import eager_random_numbers

OPTIONS = [{}, {"bidirectional": True}, {"batch_first": True}]
KINDS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


class Recurrent(nn.Module):
    def __init__(self, kind: str, dropout: float, layers: int = 3, **options: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = KINDS[kind](4, 3, layers, dropout=dropout, **options)

    def forward(self, x):
        return self.layers(x)


def compare(make, backend, tolerance):
    plain, mine = make(), zgraph.compile(make(), zgraph.Plan(backend=backend))
    found = []
    for model in (plain, mine):
        torch.manual_seed(1)
        x = torch.randn(2, 3, 4)
        with eager_random_numbers():
            output, state = model(x)
        (output.pow(2).sum() + sum(s.sum() for s in (state if isinstance(state, tuple) else (state,)))).backward()
        drawn = [torch.get_rng_state()] if backend == "eager" else []
        found.append([output.detach(), *drawn, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=tolerance)


@sweep("options, kind", [(o, k) for o in OPTIONS for k in KINDS], quick=(1, 5), ids=str)
def test_values_are_dropped_between_layers_as_in_plain_pytorch(options, kind):
    compare(lambda: Recurrent(kind, 0.5, **options), "eager", 1e-5)


@pytest.mark.inductor
@pytest.mark.slow
def test_all_is_dropped_with_inductor_as_in_plain_pytorch():
    compare(lambda: Recurrent("GRU", 1.0, 2), "inductor", 1e-4)

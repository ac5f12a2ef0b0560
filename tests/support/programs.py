"""Captured programs of small models, for tests of what only reads programs: text and digests."""

from __future__ import annotations

import models
import torch
from torch import nn

from zgraph.capture.capture import trace
from zgraph.program.program import ParamSpec, Program


def captured(model: nn.Module, inputs: object, name: str = "train") -> Program:
    """The captured training program of a model, on a mesh of two data-parallel ranks, nothing sharded."""
    params = {
        name: ParamSpec(name, tuple(p.shape), p.stride(), p.dtype, p.requires_grad)
        for name, p in model.named_parameters()
    }
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    traced = trace(model, type(model).forward, args, kwargs, params, {"dp": 2}, torch.device("cpu"))
    pattern = frozenset({traced.loss}) if traced.loss is not None else traced.differentiable
    return traced.joint(pattern, {}, name)


class Mlp(nn.Module):
    """Two layers, with a constant that is no finite number."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 3)

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        return self.down(hidden.masked_fill(hidden > 2, float("-inf"))).sum()


def captured_mlp() -> Program:
    return captured(Mlp(), (torch.randn(4, 6),))


def captured_tiny_llama() -> Program:
    case = models.build("llama")
    return captured(case.model, case.inputs)

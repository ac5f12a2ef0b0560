"""Muon: momentum, made orthogonal (Jordan et al., 2024), with torch.optim.Muon's arguments and operations.

A rank has some rows of a matrix, and the Newton-Schulz iteration needs all of them: the momentum is gathered, every
rank computes the iteration, and takes its own rows of the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zgraph.update.rule_interface import Part, Rule, State


def _states(record: Any, shape: tuple[int, ...], dtype: torch.dtype, whole: tuple[int, ...]) -> dict[str, State]:
    return {"momentum_buffer": State(shape, dtype)}


def _update(
    record: Any, p: Tensor, g: Tensor, old: Mapping[str, Tensor], s: Mapping[str, Tensor], step: Tensor, part: Part
) -> tuple[Tensor, dict[str, Tensor]]:
    momentum = torch.lerp(old["momentum_buffer"], g, (1 - s["momentum"]).to(g.dtype))
    update = torch.lerp(g, momentum, s["momentum"].to(g.dtype)) if record.nesterov else momentum
    update = part.own(orthogonal(part.whole(update), record.ns_coefficients, record.ns_steps, record.eps))
    rows, columns = part.shape
    if record.adjust_lr_fn == "match_rms_adamw":
        ratio = 0.2 * math.sqrt(max(rows, columns))
    else:
        ratio = math.sqrt(max(1, rows / columns))
    if record.weight_decay:
        p = p * (1 - s["lr"] * s["weight_decay"]).to(p.dtype)
    return torch.addcmul(p, update.to(p.dtype), (-(s["lr"] * ratio)).to(p.dtype)), {"momentum_buffer": momentum}


def orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return an approximation of the nearest matrix with orthonormal rows (or columns).

    It is a quintic Newton-Schulz iteration in bfloat16.
    """
    a, b, c = coefficients
    x = matrix.bfloat16()
    tall = matrix.shape[0] > matrix.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if tall else x


MUON = Rule(("lr", "momentum", "weight_decay"), _states, _update, counts=False)

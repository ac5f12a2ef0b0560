"""1-bit Adam (Tang et al., 2021), with the operations of DeepSpeed 0.19.6.

While it warms up it is Adam without bias corrections. After that the squares' average stays as it is, and ranks share their momenta, in
signs (`zgraph.update.signs`), not their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zgraph.update.rule import AfterFreeze, Part, Rule, State


def _states(record: Any, shape: tuple[int, ...], dtype: torch.dtype, whole: tuple[int, ...]) -> dict[str, State]:
    return {"exp_avg": State(shape, dtype), "exp_avg_sq": State(shape, dtype)}


def _stepped(record: Any, p: Tensor, first: Tensor, second: Tensor, s: Mapping[str, Tensor]) -> Tensor:
    update = first / (second.sqrt() + s["eps"].to(p.dtype))
    if record.weight_decay:
        update = torch.addcmul(update, p, s["weight_decay"].to(p.dtype))
    return torch.addcmul(p, update, (-s["lr"]).to(p.dtype))


def _momentum(record: Any, g: Tensor, old: Mapping[str, Tensor], s: Mapping[str, Tensor]) -> Tensor:
    return torch.lerp(old["exp_avg"], g, (1 - s["betas.0"]).to(g.dtype))


def _warming_up(
    record: Any, p: Tensor, g: Tensor, old: Mapping[str, Tensor], s: Mapping[str, Tensor], step: Tensor, part: Part
) -> tuple[Tensor, dict[str, Tensor]]:
    first = _momentum(record, g, old, s)
    second = torch.addcmul(old["exp_avg_sq"] * s["betas.1"].to(g.dtype), (1 - s["betas.1"]).to(g.dtype) * g, g)
    return _stepped(record, p, first, second, s), {"exp_avg": first, "exp_avg_sq": second}


def _frozen(
    record: Any, p: Tensor, mean: Tensor, old: Mapping[str, Tensor], s: Mapping[str, Tensor], step: Tensor, part: Part
) -> tuple[Tensor, dict[str, Tensor]]:
    second = old["exp_avg_sq"]
    # What has had no gradient stays: a sign has no zero, and the scale over eps alone would be a huge step.
    first = torch.where(second > 0, mean, torch.zeros_like(mean))
    return _stepped(record, p, first, second, s), {"exp_avg": first, "exp_avg_sq": second}


ONE_BIT_ADAM = Rule(
    ("lr", "betas.0", "betas.1", "eps", "weight_decay"),
    _states,
    _warming_up,
    counts=False,
    after_freeze=AfterFreeze(_momentum, _frozen),
)

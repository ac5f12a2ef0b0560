"""Adam without bias corrections, as DeepSpeed's 1-bit optimizers do it: the formulas that their rules share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zgraph.update.rule_interface import Part, State

SCALARS = ("lr", "betas.0", "betas.1", "eps", "weight_decay")


def adam_states(record: Any, shape: tuple[int, ...], dtype: torch.dtype, whole: tuple[int, ...]) -> dict[str, State]:
    """Return the states of Adam."""
    return {"exp_avg": State(shape, dtype), "exp_avg_sq": State(shape, dtype)}


def direction(record: Any, p: Tensor, first: Tensor, denominator: Tensor, s: Mapping[str, Tensor]) -> Tensor:
    """Return the update direction before the learning rate and LAMB's ratio; momenta are divided by `denominator`."""
    update = first / denominator
    return torch.addcmul(update, p, s["weight_decay"].to(p.dtype)) if record.weight_decay else update


def denominator_of(second: Tensor, s: Mapping[str, Tensor]) -> Tensor:
    """Return the denominator of a step."""
    return second.sqrt() + s["eps"].to(second.dtype)


def stepped(record: Any, p: Tensor, first: Tensor, second: Tensor, s: Mapping[str, Tensor]) -> Tensor:
    """Return the parameter after a step along these averages."""
    update = direction(record, p, first, denominator_of(second, s), s)
    return torch.addcmul(p, update, (-s["lr"]).to(p.dtype))


def new_momentum(record: Any, g: Tensor, old: Mapping[str, Tensor], s: Mapping[str, Tensor]) -> Tensor:
    """Return the average of gradients, with this one."""
    return torch.lerp(old["exp_avg"], g, (1 - s["betas.0"]).to(g.dtype))


def new_squares(g: Tensor, old: Tensor, s: Mapping[str, Tensor]) -> Tensor:
    """Return the average of squared gradients, with this one's."""
    return torch.addcmul(old * s["betas.1"].to(g.dtype), (1 - s["betas.1"]).to(g.dtype) * g, g)


def exact(
    record: Any, p: Tensor, g: Tensor, old: Mapping[str, Tensor], s: Mapping[str, Tensor], step: Tensor, part: Part
) -> tuple[Tensor, dict[str, Tensor]]:
    """Do Adam's update with a gradient that all ranks have."""
    first, second = new_momentum(record, g, old, s), new_squares(g, old["exp_avg_sq"], s)
    return stepped(record, p, first, second, s), {"exp_avg": first, "exp_avg_sq": second}


def with_gradients(mean: Tensor, second: Tensor) -> Tensor:
    """Return the mean momentum, with zeros where there has been no gradient.

    A sign has no zero, and the scale divided by eps alone would be a huge step.
    """
    return torch.where(second > 0, mean, torch.zeros_like(mean))

"""1-bit Adam (Tang et al., 2021) and 1-bit LAMB (Li et al., 2021), with the operations of DeepSpeed 0.19.6.

While they warm up they are Adam and LAMB without bias corrections. After that the average of squared gradients stays
as it is, and ranks average their momenta, sent as signs (`zgraph.update.sign_compression`), instead of their
gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zgraph.update.optimizer_rule import AfterFreeze, Part, Rule, State
from zgraph.update.trust_ratio import trust_ratio

_FRESH, _RATIO, _FACTOR = "exp_avg_sq_fresh", "lamb_coeff_freeze", "last_factor"


def _states(record: Any, shape: tuple[int, ...], dtype: torch.dtype, whole: tuple[int, ...]) -> dict[str, State]:
    return {"exp_avg": State(shape, dtype), "exp_avg_sq": State(shape, dtype)}


def _direction(record: Any, p: Tensor, first: Tensor, root: Tensor, s: Mapping[str, Tensor]) -> Tensor:
    """Return the update direction before the learning rate and LAMB's ratio; momenta are divided by `root`."""
    update = first / root
    return torch.addcmul(update, p, s["weight_decay"].to(p.dtype)) if record.weight_decay else update


def _root(second: Tensor, s: Mapping[str, Tensor]) -> Tensor:
    return second.sqrt() + s["eps"].to(second.dtype)


def _stepped(record: Any, p: Tensor, first: Tensor, second: Tensor, s: Mapping[str, Tensor]) -> Tensor:
    update = _direction(record, p, first, _root(second, s), s)
    return torch.addcmul(p, update, (-s["lr"]).to(p.dtype))


def _momentum(record: Any, g: Tensor, old: Mapping[str, Tensor], s: Mapping[str, Tensor]) -> Tensor:
    return torch.lerp(old["exp_avg"], g, (1 - s["betas.0"]).to(g.dtype))


def _squares(g: Tensor, old: Tensor, s: Mapping[str, Tensor]) -> Tensor:
    return torch.addcmul(old * s["betas.1"].to(g.dtype), (1 - s["betas.1"]).to(g.dtype) * g, g)


def _warming_up(
    record: Any, p: Tensor, g: Tensor, old: Mapping[str, Tensor], s: Mapping[str, Tensor], step: Tensor, part: Part
) -> tuple[Tensor, dict[str, Tensor]]:
    first, second = _momentum(record, g, old, s), _squares(g, old["exp_avg_sq"], s)
    return _stepped(record, p, first, second, s), {"exp_avg": first, "exp_avg_sq": second}


def _with_gradients(mean: Tensor, second: Tensor) -> Tensor:
    """Return the mean momentum, with zeros where there has been no gradient.

    A sign has no zero, and the scale divided by eps alone would be a huge step.
    """
    return torch.where(second > 0, mean, torch.zeros_like(mean))


def _frozen(
    record: Any, p: Tensor, mean: Tensor, old: Mapping[str, Tensor], s: Mapping[str, Tensor], step: Tensor, part: Part
) -> tuple[Tensor, dict[str, Tensor]]:
    second = old["exp_avg_sq"]
    first = _with_gradients(mean, second)
    return _stepped(record, p, first, second, s), {"exp_avg": first, "exp_avg_sq": second}


# -- LAMB --------------------------------------------------------------------------------------------------------------
def _lamb_states(record: Any, shape: tuple[int, ...], dtype: torch.dtype, whole: tuple[int, ...]) -> dict[str, State]:
    numbers = {_RATIO: State((), dtype, of_rows=True), _FACTOR: State((), dtype, 1.0, of_rows=True)}
    return {**_states(record, shape, dtype, whole), _FRESH: State(shape, dtype), **numbers}


def _lamb_warming_up(
    record: Any, p: Tensor, g: Tensor, old: Mapping[str, Tensor], s: Mapping[str, Tensor], step: Tensor, part: Part
) -> tuple[Tensor, dict[str, Tensor]]:
    """Do LAMB's update; keep the average of ratios other than 1, and a second copy of the squares' average, for later."""
    first, second = _momentum(record, g, old, s), _squares(g, old["exp_avg_sq"], s)
    update = _direction(record, p, first, _root(second, s), s)
    ratio = trust_ratio(record, p, update, part)
    beta = record.coeff_beta
    average = torch.where(ratio != 1, beta * old[_RATIO] + (1 - beta) * ratio, old[_RATIO])
    new = p - s["lr"].to(p.dtype) * ratio * update
    return new, {"exp_avg": first, "exp_avg_sq": second, _FRESH: second, _RATIO: average, _FACTOR: old[_FACTOR]}


def _lamb_frozen(
    record: Any, p: Tensor, mean: Tensor, old: Mapping[str, Tensor], s: Mapping[str, Tensor], step: Tensor, part: Part
) -> tuple[Tensor, dict[str, Tensor]]:
    """Do LAMB's update with the frozen average of ratios times a factor, which estimates how far the squares' average
    would have moved.

    The gradient is computed from two momenta, as they were sent. The factor is the largest quotient of denominators,
    weighted by the share of the momentum in the update's norm beside weight decay, and changes by at most
    `factor_threshold` of itself in a step.
    """
    second = old["exp_avg_sq"]
    first = _with_gradients(mean, second)
    beta = s["betas.0"].to(p.dtype)
    fresh = _squares((first - beta * old["exp_avg"]) / (1 - beta), old[_FRESH], s)
    root = _root(second, s)
    update = _direction(record, p, first, root, s)
    factor = (root / _root(fresh, s)).max() if root.numel() else torch.ones_like(old[_FACTOR])
    if record.weight_decay:
        own, whole = (first / root).square().sum().sqrt(), update.square().sum().sqrt()
        share = torch.where(whole > 0, (own / whole).clamp(max=1.0), torch.ones_like(own))
        factor = factor * share + (1 - share)
    factor = factor.clamp(record.factor_min, record.factor_max)
    last = old[_FACTOR]
    factor = torch.minimum(factor, last * (1 + record.factor_threshold))
    factor = torch.maximum(factor, last * (1 - record.factor_threshold))
    new = p - s["lr"].to(p.dtype) * old[_RATIO] * factor * update
    return new, {"exp_avg": first, "exp_avg_sq": second, _FRESH: fresh, _RATIO: old[_RATIO], _FACTOR: factor}


_SCALARS = ("lr", "betas.0", "betas.1", "eps", "weight_decay")

ONE_BIT_ADAM = Rule(_SCALARS, _states, _warming_up, counts=False, after_freeze=AfterFreeze(_momentum, _frozen))
ONE_BIT_LAMB = Rule(
    _SCALARS, _lamb_states, _lamb_warming_up, counts=False, after_freeze=AfterFreeze(_momentum, _lamb_frozen)
)

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

from zgraph.plan.optimizers import UpdateKind
from zgraph.update.rule_interface import Part, Rule, State, Unreduced
from zgraph.update.trust_ratio import trust_ratio
from zgraph.update.uncorrected_adam import (
    SCALARS,
    adam_states,
    denominator_of,
    direction,
    exact,
    new_momentum,
    new_squares,
    stepped,
    with_gradients,
)

_FRESH, _RATIO, _FACTOR = "exp_avg_sq_fresh", "lamb_coeff_freeze", "last_factor"


def _frozen(
    record: Any, p: Tensor, mean: Tensor, old: Mapping[str, Tensor], s: Mapping[str, Tensor], step: Tensor, part: Part
) -> tuple[Tensor, dict[str, Tensor]]:
    second = old["exp_avg_sq"]
    first = with_gradients(mean, second)
    return stepped(record, p, first, second, s), {"exp_avg": first, "exp_avg_sq": second}


# -- LAMB --------------------------------------------------------------------------------------------------------------
def _lamb_states(record: Any, shape: tuple[int, ...], dtype: torch.dtype, whole: tuple[int, ...]) -> dict[str, State]:
    numbers = {_RATIO: State((), dtype, of_rows=True), _FACTOR: State((), dtype, 1.0, of_rows=True)}
    return {**adam_states(record, shape, dtype, whole), _FRESH: State(shape, dtype), **numbers}


def _lamb_warming_up(
    record: Any, p: Tensor, g: Tensor, old: Mapping[str, Tensor], s: Mapping[str, Tensor], step: Tensor, part: Part
) -> tuple[Tensor, dict[str, Tensor]]:
    """Do LAMB's update; keep the average of ratios other than 1, and a second copy of the squares' average, for later."""
    first, second = new_momentum(record, g, old, s), new_squares(g, old["exp_avg_sq"], s)
    update = direction(record, p, first, denominator_of(second, s), s)
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
    first = with_gradients(mean, second)
    beta = s["betas.0"].to(p.dtype)
    fresh = new_squares((first - beta * old["exp_avg"]) / (1 - beta), old[_FRESH], s)
    root = denominator_of(second, s)
    update = direction(record, p, first, root, s)
    factor = (root / denominator_of(fresh, s)).max() if root.numel() else torch.ones_like(old[_FACTOR])
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


_MOMENTA = UpdateKind.MOMENTUM_SIGNS

ONE_BIT_ADAM = Rule(
    SCALARS, adam_states, exact, counts=False, unreduced={_MOMENTA: Unreduced(_frozen, shared=new_momentum)}
)
ONE_BIT_LAMB = Rule(
    SCALARS,
    _lamb_states,
    _lamb_warming_up,
    counts=False,
    unreduced={_MOMENTA: Unreduced(_lamb_frozen, shared=new_momentum)},
)

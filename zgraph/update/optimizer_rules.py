"""The optimizers' rules, as pure functions of one parameter's tensors.

Each does torch's own operations in torch's own order (the single-tensor path of torch 2.13, foreach=False), so that in
eager mode on float32 the results are torch's bit for bit: numbers are computed in float64 and rounded once, as torch
rounds a Python number, and a sum of a product is addcmul or addcdiv with its factor multiplied in first, whose CPU
kernels round as those of `add(alpha=)`, `addcmul(value=)` and `addcdiv(value=)` do (measured:
tests/update/test_update_programs.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zgraph.plan.local_steps import LocalSteps
from zgraph.plan.optimizers import Optimizer
from zgraph.update.adamw8bit import blockwise
from zgraph.update.local_steps import with_local_steps
from zgraph.update.muon import MUON
from zgraph.update.onebit import ONE_BIT_ADAM, ONE_BIT_LAMB
from zgraph.update.rule_interface import Part, Rule, State
from zgraph.update.trust_ratio import trust_ratio
from zgraph.update.zero_one import ZERO_ONE_ADAM

__all__ = ["RULES", "rule_of"]


def _as(number: Tensor, like: Tensor) -> Tensor:
    return number.to(like.dtype)


def _bias_corrections(s: Mapping[str, Tensor], step: Tensor) -> tuple[Tensor, Tensor]:
    return 1 - s["betas.0"] ** step, 1 - s["betas.1"] ** step


def _followed(record: Any, p: Tensor, g: Tensor, s: Mapping[str, Tensor], *, decays: bool = True) -> Tensor:
    """Return the gradient that an update follows: negated for `maximize`, with the gradient of the L2 penalty added."""
    g = -g if record.maximize else g
    return torch.addcmul(g, p, _as(s["weight_decay"], g)) if record.weight_decay and decays else g


def _decayed(record: Any, p: Tensor, s: Mapping[str, Tensor]) -> Tensor:
    """Return the weight after decoupled weight decay."""
    return p * _as(1 - s["lr"] * s["weight_decay"], p) if record.weight_decay else p


# -- Adam, AdamW --------------------------------------------------------------------------------------------------------
def _adam_states(record: Any, shape: tuple[int, ...], dtype: torch.dtype, whole: tuple[int, ...]) -> dict[str, State]:
    names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if record.amsgrad else [])]
    return {name: State(shape, dtype) for name in names}


def _adam(
    record: Any, p: Tensor, g: Tensor, old: Mapping[str, Tensor], s: Mapping[str, Tensor], step: Tensor, part: Part
) -> tuple[Tensor, dict[str, Tensor]]:
    decoupled = record.name != "Adam" or record.decoupled_weight_decay
    g = _followed(record, p, g, s, decays=not decoupled)
    p = _decayed(record, p, s) if decoupled else p
    new = {
        "exp_avg": torch.lerp(old["exp_avg"], g, _as(1 - s["betas.0"], g)),
        "exp_avg_sq": torch.addcmul(old["exp_avg_sq"] * _as(s["betas.1"], g), _as(1 - s["betas.1"], g) * g, g),
    }
    second = new["exp_avg_sq"]
    if record.amsgrad:
        second = new["max_exp_avg_sq"] = torch.maximum(old["max_exp_avg_sq"], second)
    first_correction, second_correction = _bias_corrections(s, step)
    denominator = second.sqrt() / _as(second_correction**0.5, g) + _as(s["eps"], g)
    return torch.addcdiv(p, _as(-(s["lr"] / first_correction), p) * new["exp_avg"], denominator), new


# -- SGD ----------------------------------------------------------------------------------------------------------------
def _sgd_states(record: Any, shape: tuple[int, ...], dtype: torch.dtype, whole: tuple[int, ...]) -> dict[str, State]:
    return {"momentum_buffer": State(shape, dtype)} if record.momentum else {}


def _sgd(
    record: Any, p: Tensor, g: Tensor, old: Mapping[str, Tensor], s: Mapping[str, Tensor], step: Tensor, part: Part
) -> tuple[Tensor, dict[str, Tensor]]:
    g = _followed(record, p, g, s)
    new: dict[str, Tensor] = {}
    if record.momentum:
        momentum = torch.addcmul(old["momentum_buffer"] * _as(s["momentum"], g), g, _as(1 - s["dampening"], g))
        # torch's buffer begins as the first gradient, without dampening.
        momentum = new["momentum_buffer"] = torch.where(step == 1, g, momentum)
        g = torch.addcmul(g, momentum, _as(s["momentum"], g)) if record.nesterov else momentum
    return torch.addcmul(p, g, _as(-s["lr"], p)), new


# -- Adagrad ------------------------------------------------------------------------------------------------------------
def _adagrad_states(
    record: Any, shape: tuple[int, ...], dtype: torch.dtype, whole: tuple[int, ...]
) -> dict[str, State]:
    return {"sum": State(shape, dtype, record.initial_accumulator_value)}


def _adagrad(
    record: Any, p: Tensor, g: Tensor, old: Mapping[str, Tensor], s: Mapping[str, Tensor], step: Tensor, part: Part
) -> tuple[Tensor, dict[str, Tensor]]:
    g = _followed(record, p, g, s)
    rate = s["lr"] / (1 + (step - 1) * s["lr_decay"])
    total = torch.addcmul(old["sum"], g, g)
    return torch.addcdiv(p, _as(-rate, p) * g, total.sqrt() + _as(s["eps"], g)), {"sum": total}


# -- Lion ---------------------------------------------------------------------------------------------------------------
def _lion_states(record: Any, shape: tuple[int, ...], dtype: torch.dtype, whole: tuple[int, ...]) -> dict[str, State]:
    return {"exp_avg": State(shape, dtype)}


def _lion(
    record: Any, p: Tensor, g: Tensor, old: Mapping[str, Tensor], s: Mapping[str, Tensor], step: Tensor, part: Part
) -> tuple[Tensor, dict[str, Tensor]]:
    p = _decayed(record, p, s)
    momentum = old["exp_avg"]
    direction = (momentum * _as(s["betas.0"], g) + _as(1 - s["betas.0"], g) * g).sign()
    return p - _as(s["lr"], p) * direction, {"exp_avg": momentum * _as(s["betas.1"], g) + _as(1 - s["betas.1"], g) * g}


# -- LAMB ---------------------------------------------------------------------------------------------------------------
def _lamb_states(record: Any, shape: tuple[int, ...], dtype: torch.dtype, whole: tuple[int, ...]) -> dict[str, State]:
    return {"exp_avg": State(shape, dtype), "exp_avg_sq": State(shape, dtype)}


def _lamb(
    record: Any, p: Tensor, g: Tensor, old: Mapping[str, Tensor], s: Mapping[str, Tensor], step: Tensor, part: Part
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return p - size * ratio * u and the new moments, where ratio is `trust_ratio`."""
    first = torch.lerp(old["exp_avg"], g, _as(1 - s["betas.0"], g))
    second = torch.addcmul(old["exp_avg_sq"] * _as(s["betas.1"], g), _as(1 - s["betas.1"], g) * g, g)
    update = first / (second.sqrt() + _as(s["eps"], g))
    if record.weight_decay:
        update = update + _as(s["weight_decay"], p) * p
    ratio = trust_ratio(record, p, update, part)
    size = s["lr"]
    if record.bias_correction:
        first_correction, second_correction = _bias_corrections(s, step)
        size = size * second_correction**0.5 / first_correction
    return p - _as(size, p) * ratio * update, {"exp_avg": first, "exp_avg_sq": second}


_BETAS = ("betas.0", "betas.1")

_ADAM = Rule(("lr", *_BETAS, "eps", "weight_decay"), _adam_states, _adam)

RULES: dict[str, Rule] = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "AdamW8bit": blockwise(_ADAM),
    "SGD": Rule(
        ("lr", "momentum", "dampening", "weight_decay"), _sgd_states, _sgd, counts=False, begins="momentum_buffer"
    ),
    "Adagrad": Rule(("lr", "lr_decay", "eps", "weight_decay"), _adagrad_states, _adagrad),
    "Lion": Rule(("lr", *_BETAS, "weight_decay"), _lion_states, _lion, counts=False),
    "LAMB": Rule(("lr", *_BETAS, "eps", "weight_decay"), _lamb_states, _lamb),
    "Muon": MUON,
    "OneBitAdam": ONE_BIT_ADAM,
    "OneBitLAMB": ONE_BIT_LAMB,
    "ZeroOneAdam": ZERO_ONE_ADAM,
}
"""Each optimizer's rule, by the name of its record in `zgraph.plan.optimizers`."""


def rule_of(record: Optimizer, local: LocalSteps | None) -> Rule:
    """Return the rule of an optimizer, whose updates may be local steps."""
    rule = RULES[record.name]
    return rule if local is None else with_local_steps(rule, RULES[local.outer.name], local)

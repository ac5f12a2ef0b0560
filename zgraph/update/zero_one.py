"""0/1 Adam (Lu et al., 2022), with the operations of DeepSpeed 0.19.6.

Its updates are of four kinds, and the record says which comes when:

- exact: Adam without bias corrections; the only one that changes the average of squares;
- signs: the momentum takes the ranks' mean gradient, as it was sent in signs;
- local: each rank follows its own momentum, and nothing is sent;
- the last of a round: as local; then ranks share what they have moved since they were together, times the
  denominator that all divide by, in signs. The mean, divided by it again, is where all go on from; over the round's
  learning rates it is the common momentum.

DeepSpeed adds up what was moved, and takes it back at the end of a round, by which the ranks' weights drift apart by
rounding. Here each rank keeps where the round began: all ranks have the same weights after it, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zgraph.plan.optimizers import UpdateKind
from zgraph.update.rule_interface import LOCAL_STEPS, SYNCHRONIZED, Part, Rule, State, Synchronization, Unreduced
from zgraph.update.uncorrected_adam import (
    SCALARS,
    adam_states,
    denominator_of,
    exact,
    new_momentum,
    stepped,
    with_gradients,
)

_RATES = "lrs"  # the sum of a round's learning rates
_OF_ROUND = (LOCAL_STEPS, _RATES)


def _states(record: Any, shape: tuple[int, ...], dtype: torch.dtype, whole: tuple[int, ...]) -> dict[str, State]:
    numbers = {key: State((), dtype, of_rows=True) for key in _OF_ROUND}
    return {**adam_states(record, shape, dtype, whole), SYNCHRONIZED: State(shape, dtype, weight=True), **numbers}


def _exact(
    record: Any, p: Tensor, g: Tensor, old: Mapping[str, Tensor], s: Mapping[str, Tensor], step: Tensor, part: Part
) -> tuple[Tensor, dict[str, Tensor]]:
    new, changed = exact(record, p, g, old, s, step, part)
    return new, {**old, **changed}


def _own_gradient(record: Any, g: Tensor, old: Mapping[str, Tensor], s: Mapping[str, Tensor]) -> Tensor:
    return g


def _along_own_momentum(
    record: Any, p: Tensor, g: Tensor, old: Mapping[str, Tensor], s: Mapping[str, Tensor], step: Tensor, part: Part
) -> tuple[Tensor, dict[str, Tensor]]:
    """Do Adam's update with the average of squares as it is."""
    second = old["exp_avg_sq"]
    first = new_momentum(record, with_gradients(g, second), old, s)
    return stepped(record, p, first, second, s), {**old, "exp_avg": first}


def _local(
    record: Any, p: Tensor, g: Tensor, old: Mapping[str, Tensor], s: Mapping[str, Tensor], step: Tensor, part: Part
) -> tuple[Tensor, dict[str, Tensor]]:
    """Do the same as a step of a round: the first notes where the round begins."""
    new, changed = _along_own_momentum(record, p, g, old, s, step, part)
    begun = torch.where(old[LOCAL_STEPS] > 0, old[SYNCHRONIZED], p)
    rates = old[_RATES] + s["lr"].to(old[_RATES].dtype)
    return new, {**changed, SYNCHRONIZED: begun, _RATES: rates, LOCAL_STEPS: old[LOCAL_STEPS] + 1}


def _begun(p: Tensor, states: Mapping[str, Tensor]) -> Tensor:
    """Return where a round began: here, if all of its steps were skipped."""
    return torch.where(states[LOCAL_STEPS] > 0, states[SYNCHRONIZED], p)


def _moved(record: Any, p: Tensor, states: Mapping[str, Tensor], s: Mapping[str, Tensor]) -> Tensor:
    return (p - _begun(p, states)) * denominator_of(states["exp_avg_sq"], s)


def _settled(
    record: Any, p: Tensor, mean: Tensor, states: Mapping[str, Tensor], s: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the common weight and momentum after a round; the momentum is zero if its learning rates were."""
    second, rates = states["exp_avg_sq"], states[_RATES]
    mean = with_gradients(mean, second)
    new = _begun(p, states) + mean / denominator_of(second, s)
    followed = torch.where(rates > 0, -mean / torch.where(rates > 0, rates, 1.0), torch.zeros_like(mean))
    first = torch.where(states[LOCAL_STEPS] > 0, followed, states["exp_avg"])
    numbers = {key: torch.zeros_like(states[key]) for key in _OF_ROUND}
    return new, {**states, "exp_avg": first, **numbers}


ZERO_ONE_ADAM = Rule(
    SCALARS,
    _states,
    _exact,
    counts=False,
    unreduced={
        UpdateKind.GRADIENT_SIGNS: Unreduced(_along_own_momentum, shared=_own_gradient),
        UpdateKind.NOTHING: Unreduced(_local),
        UpdateKind.ROUND_SIGNS: Unreduced(_local, synchronization=Synchronization(_moved, _settled)),
    },
    local=lambda key: key == "exp_avg",
    of_round=_OF_ROUND,
)

"""Reads the outcome of each step, one step late: taken, skipped for an overflow, or not finite.

[Note: no waiting] Whether a step is skipped, the loss scale and the number of updates live on the device. A copy to
pinned memory is started after each update and read before the next, when the device has long been given the next
forward and backward. Only half precision's end of the run, schedules and steps that are not finite need it; where
the device is the host, the last are read at once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from zgraph.errors import OverflowError
from zgraph.plan.loss_scaling import LossScale
from zgraph.runtime.delayed_readback import DelayedReadback
from zgraph.runtime.learning_rates import LearningRates
from zgraph.runtime.rank import Rank
from zgraph.update import scaler
from zgraph.update.build_update import NONFINITE
from zgraph.update.states import States

if TYPE_CHECKING:
    from zgraph.update.resume import Known

logger = logging.getLogger(__name__)


class StepOutcomes:
    """The outcomes of one compiled module's steps. The schedule's `rates` advance with each update that was not
    skipped.
    """

    def __init__(self, rank: Rank, states: States, scaling: LossScale | None, rates: LearningRates | None) -> None:
        self.rank = rank
        self.states = states
        self.scaling = scaling
        self.rates = rates
        self._late: DelayedReadback | None = None

    def skipped(self) -> int:
        """Return the number of skipped steps that the host knows of (all but the last step's)."""
        return self._late.skipped if self._late is not None else 0

    def note(self) -> None:
        """Start to copy the outcome of the update just started to the host, which reads it one step later."""
        skipped, nonfinite = self.states.skipped(), self.states.nonfinite()
        if skipped is None:
            if self.rates is not None:
                self.rates.advance()
            return
        if self._late is None:
            self._late = DelayedReadback(self.rank.device)
        values = self.states.of_scale() | {"skipped": skipped}
        self._late.start(values if nonfinite is None else values | {NONFINITE: nonfinite})

    def settle(self, step: int) -> None:
        """Read the outcome of the last step, whose number is `step`. Raises `NonFiniteError` or `OverflowError` if it
        ends the run.
        """
        late, watcher = self._late, self.rank.nonfinite
        if late is None:
            return
        before, counted = late.skipped, late.nonfinite
        new = late.read()
        if new and late.skipped == before and self.rates is not None:
            self.rates.advance()
        if watcher is not None and late.nonfinite > counted:
            said = f"its loss or a gradient is infinite or no number; {late.skipped} steps were skipped so far"
            watcher.report(step, said)
        elif watcher is not None and late.exhausted and watcher.explains:
            watcher.report(step, f"gradients overflow at the smallest loss scale, {late.scale}")
        elif watcher is not None and new:
            watcher.was_finite()
        if late.exhausted:
            raise OverflowError(
                "the loss scale is at its minimum already, and the gradients still overflow",
                where="precision.loss_scale.min_loss_scale",
                why=f"the scale is {late.scale}; {late.skipped} steps were skipped so far",
                hint="look for infinite losses or inputs, lower the learning rate, or use bf16, which needs no scale",
            )

    def adopt(self, other: StepOutcomes) -> None:
        """Continue from another's state, for the same optimizer states, unless the plan scales the loss differently."""
        if self.scaling != other.scaling or other._late is None:
            return
        self._late = other._late.copy()
        counted = self.states.nonfinite()
        if counted is not None and other.states.nonfinite() is None:
            counted.fill_(self._late.nonfinite if self.scaling else self._late.skipped)

    def restore(self, known: Known, *, whole: bool) -> None:
        """Continue from a checkpoint whose states were loaded; start again from zero if not `whole`."""
        skipped = known.skipped if whole else 0
        counted = self.states.nonfinite()
        if counted is not None:
            counted.fill_(skipped if self.scaling is None else 0)
        if self.scaling is not None or counted is not None:
            self._late = DelayedReadback(self.rank.device)
            self._late.skipped, self._late.nonfinite = skipped, int(counted) if counted is not None else 0
        if self.scaling is not None:
            saved = known.loss_scale if whole else None
            if saved is None:
                logger.warning("the loss scale begins anew: the checkpoint has none")
            values = scaler.initial(self.scaling) if saved is None else saved
            for key, tensor in self.states.of_scale().items():
                if key in values:
                    tensor.copy_(torch.as_tensor(values[key]))

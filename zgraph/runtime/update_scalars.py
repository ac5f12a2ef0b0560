"""Collects the scalars that an update program takes: the optimizer's numbers, the factor of the gradients, and the
step's loss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from zgraph.errors import ZgraphError
from zgraph.ranks.foreseen_actions import Coming
from zgraph.runtime.rank import Rank
from zgraph.update.build_update import UpdateOptions
from zgraph.update.hyperparameters import Hyperparameters
from zgraph.update.optimizer import PlanOptimizer

if TYPE_CHECKING:
    from zgraph.update.resume import Known

logger = logging.getLogger(__name__)


class UpdateScalars:
    """The scalars of one compiled module's updates. `wanted` are those of the optimizer that any rank's programs take
    (see `scalar_names`).
    """

    def __init__(self, rank: Rank, optimizer: PlanOptimizer | None, wanted: Sequence[tuple[int, str]]) -> None:
        self.rank = rank
        self.optimizer = optimizer
        # What the next update multiplies gradients by, if its options say that it does.
        self.factor: torch.Tensor | float = 1.0
        self._wanted = wanted
        self._agreed = Hyperparameters()

    def coming(self, done: int) -> Coming:
        """Return what this rank tells in votes about the update that follows `done` updates: its current numbers."""
        try:
            now = Hyperparameters(self._now() if self.optimizer is not None else {})
        except ZgraphError as error:
            now = Hyperparameters(problem=str(error))
        return f"{done} {now.ballot()}", (f"after {done} updates", now)

    def agree(self, names: Sequence[str], read_back: Callable[[], dict[str, str]], coming: Coming) -> None:
        """Let ranks compare the parameters that they are about to update, the numbers, and the changes in the optimizer
        that `read_back` returns. If it raises on one rank, all raise. No vote is needed if the numbers are still the
        ones that ranks announced in `coming`.
        """
        problem: ZgraphError | None = None
        try:
            changed = read_back()
            self._agreed = Hyperparameters(self._now(), changed)
        except ZgraphError as error:
            problem = error
            self._agreed = Hyperparameters(problem=str(error))
        plain = problem is None and not self._agreed.changed
        if not (plain and self.rank.needed_votes.passes_update(names, coming)):
            self.rank.agree_on_update(names, self._agreed)
        self.rank.needed_votes.did_update(names)
        if problem is not None:
            raise problem

    def have_changed(self) -> bool:
        """Return whether the optimizer's numbers differ from those that ranks have agreed on."""
        return self.optimizer is not None and self._now() != self._agreed.values

    def vector(self, wanted: Sequence[tuple[int, str]], options: UpdateOptions) -> torch.Tensor:
        """Return the scalars that a program takes, as a vector on the device."""
        device, nonfinite = self.rank.device, self.rank.nonfinite
        values = [self._agreed.values[w] for w in wanted if w[0] >= 0]
        vector = torch.tensor(values, dtype=torch.float64)
        if device.type == "cuda":
            vector = vector.pin_memory().to(device, non_blocking=True)
        if options.factor:
            factor = torch.as_tensor(self.factor, dtype=torch.float64).to(device).reshape(1)
            vector = torch.cat([vector, factor])
            self.factor = 1.0  # (it applies to these gradients alone)
        if options.nonfinite and nonfinite is not None:
            vector = torch.cat([vector, nonfinite.loss().reshape(1)])
        return vector

    def restore(self, known: Known) -> None:
        """Take over the numbers that the saved run had in its parameter groups, if they are of this plan's
        optimizer.
        """
        if self.optimizer is None or not known.groups:
            return
        plan = self.rank.plan.model_dump(mode="json")
        groups = self.optimizer.param_groups
        alike = [g["names"] for g in groups] == [g["names"] for g in known.groups]
        if known.plan is None or known.plan.get("optimizer") != plan["optimizer"] or not alike:
            logger.warning("the checkpoint's optimizer had other numbers or groups than the plan's: the plan's hold")
            return
        for mine, theirs in zip(groups, known.groups, strict=True):
            for key in mine.keys() & theirs.keys() - {"params", "names"}:
                mine[key] = tuple(theirs[key]) if isinstance(mine[key], tuple) else theirs[key]

    def _now(self) -> dict[tuple[int, str], float]:
        assert self.optimizer is not None
        return dict(zip(self._wanted, self.optimizer.numbers(self._wanted), strict=True))

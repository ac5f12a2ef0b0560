"""Sets what a plan's schedule gives in the parameter groups of its optimizer."""

from __future__ import annotations

from typing import Any

from zgraph.plan.lr_schedules import TorchSchedule
from zgraph.plan.plan import Plan
from zgraph.update.optimizer import PlanOptimizer
from zgraph.update.torch_lr_schedulers import torch_scheduler


class LearningRates:
    """The learning rates and momenta of an optimizer's groups, set by the plan's `lr_schedule`."""

    def __init__(self, plan: Plan, optimizer: PlanOptimizer) -> None:
        self.plan = plan
        self.optimizer = optimizer
        self._base = [dict(g) for g in optimizer.param_groups]
        # torch's own scheduler, if the plan's schedule is one of torch's
        self._scheduler: Any = self._new_scheduler()

    def _new_scheduler(self) -> Any:
        record = self.plan.lr_schedule
        return torch_scheduler(record, self.optimizer) if isinstance(record, TorchSchedule) else None

    def set(self, done: int) -> None:
        """Set the values for the update that follows `done` updates."""
        record = self.plan.lr_schedule
        if record is None or isinstance(record, TorchSchedule):
            return
        for base, group in zip(self._base, self.optimizer.param_groups, strict=True):
            momentum = base["betas"][0] if "betas" in base else base.get("momentum", 0.0)
            point = record.at(done, base["lr"], momentum)
            group["lr"] = point.lr
            if "betas" in base:
                group["betas"] = (point.momentum, *base["betas"][1:])
            elif base.get("momentum"):
                group["momentum"] = point.momentum

    def advance(self) -> None:
        """Advance torch's scheduler: an update was made, not skipped."""
        if self._scheduler is not None:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch warns of a scheduler that runs ahead
            self._scheduler.step()

    def reset(self) -> None:
        """Restore the values that the plan gives."""
        for base, group in zip(self._base, self.optimizer.param_groups, strict=True):
            group.update({k: v for k, v in base.items() if k not in ("params", "names")})

    def restart(self, done: int) -> None:
        """Restart torch's scheduler as it is after `done` updates."""
        if self._scheduler is None:
            return
        self.reset()
        for group in self.optimizer.param_groups:
            group.pop("initial_lr", None)
        self._scheduler = self._new_scheduler()
        for _ in range(done):
            self.advance()

    def adopt(self, old: LearningRates) -> None:
        """Continue from the state of another schedule."""
        if self._scheduler is not None and old._scheduler is not None:
            self._scheduler.load_state_dict(old._scheduler.state_dict())

"""fp16 in a Trainer: the rule of torch's GradScaler as a plan's loss scaling, and an object in the GradScaler's
place."""

from __future__ import annotations

import math
from typing import Any

import torch

from zgraph.errors import PlanError
from zgraph.plan.loss_scaling import MAX_POWER, LossScale


def loss_scale_of(scaler: torch.amp.GradScaler | None) -> LossScale:
    """Return the plan's loss scaling for a GradScaler, or for torch's default one. Raises `PlanError` for what a
    plan can't express."""
    first, window, factors = 2.0**16, 2000, (2.0, 0.5)
    if scaler is not None:
        first, window = float(scaler.get_scale()), scaler.get_growth_interval()
        factors = scaler.get_growth_factor(), scaler.get_backoff_factor()
    power = math.log2(first)
    if factors != (2.0, 0.5) or not power.is_integer() or not 0 <= power <= MAX_POWER:
        raise PlanError(
            f"a plan can't scale losses by {first}, with factors {factors[0]} and {factors[1]}",
            where="the accelerator's GradScaler",
            why="its scales are powers of two",
            hint="init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, or other powers of two",
        )
    return LossScale(
        initial_scale_power=int(power),
        loss_scale_window=window,
        hysteresis=1,
        doubles_within_window=True,
        min_loss_scale=2.0**-MAX_POWER,
        ends_at_minimum=False,
    )


class PlanScaler:
    """A replacement for accelerate's GradScaler: programs scale losses and gradients, and the update decides whether a
    step is skipped.

    `told`: whether the Trainer's scheduler waits at a skipped step. It does not with torch's fused optimizers,
    transformers' default: these skip steps themselves, which accelerate does not see.
    """

    def __init__(self, trainer: Any, *, told: bool) -> None:
        self._trainer = trainer
        self._told = told

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss unchanged: the backward program scales its tangents."""
        return loss

    def unscale_(self, optimizer: Any) -> None:
        """Do nothing: `.grad` is not scaled."""

    def step(self, optimizer: Any, closure: Any = None) -> None:
        """Run the update, and tell accelerate whether it was skipped."""
        before = self._trainer.model.zgraph.skipped_steps.clone() if self._told else None
        optimizer.step(closure)
        if before is not None:
            done = bool(self._trainer.model.zgraph.skipped_steps == before)
            self._trainer.optimizer._accelerate_step_called = done

    def update(self) -> None:
        """Do nothing: the update program adjusts the scale."""

    def get_scale(self) -> float:
        """Return the scale of the next step's loss."""
        return float(self._trainer.model.zgraph.loss_scale)

    def state_dict(self) -> dict[str, Any]:
        """Return {}: the scale is in the model's checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the scale is in the model's checkpoint."""

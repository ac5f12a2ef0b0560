"""What a plan says of loss scaling, which keeps the small gradients of half precision above zero.

The rule is that of DeepSpeed, whose names and defaults these are; `zgraph.update.scaler` is the rule itself. Nothing
here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, FiniteFloat, StrictBool, StrictInt, model_validator

from zgraph.errors import PlanError
from zgraph.record import Record

__all__ = ["MAX_POWER", "LossScale"]

MAX_POWER = 126
"""No scale is above 2**126, so that a scale and its reciprocal are both normal numbers in float32.

DeepSpeed keeps the scale in double precision and has no such bound.
"""

_Scale = Annotated[FiniteFloat, Field(ge=2.0**-MAX_POWER, le=2.0**MAX_POWER)]


class LossScale(Record, frozen=True):
    """A loss scale that follows overflows, or a fixed one.

    The loss is multiplied by it and the gradients are divided by it. An update whose gradients are not all finite is
    skipped, whether the scale is fixed or not. The rule is that of DeepSpeed's "fp16"
    (deepspeed/runtime/fp16/loss_scaler.py, 0.19.6) and of Micikevicius et al., 2018, "Mixed Precision Training".
    Raises `PlanError` for a value out of range and for a minimum above the first scale.
    """

    initial_scale_power: Annotated[StrictInt, Field(ge=0, le=MAX_POWER)] = Field(
        default=16, description="the first scale is 2 to this power"
    )
    loss_scale_window: Annotated[StrictInt, Field(gt=0)] = Field(
        default=1000, description="steps without an overflow before the scale is doubled"
    )
    hysteresis: Annotated[StrictInt, Field(gt=0)] = Field(
        default=2, description="overflows before the scale is halved: the last of them, and each one after it, does it"
    )
    consecutive_hysteresis: StrictBool = Field(
        default=False, description="whether a step without an overflow makes that count start again"
    )
    doubles_within_window: StrictBool = Field(
        default=False,
        description="whether the last step of a window without overflow doubles the scale (torch's GradScaler), or the one after it (DeepSpeed)",
    )
    min_loss_scale: _Scale = Field(default=1.0, description="the smallest scale")
    ends_at_minimum: StrictBool = Field(
        default=True, description="whether an overflow at the smallest scale ends the run; else its step is skipped"
    )
    static: _Scale | None = Field(default=None, description="a fixed scale, above 0; None: it follows overflows")

    @model_validator(mode="after")
    def _check_minimum(self) -> Self:
        first = 2.0**self.initial_scale_power
        if self.static is None and self.min_loss_scale > first:
            raise PlanError(
                f"the smallest loss scale {self.min_loss_scale} is above the first, {first}",
                where="min_loss_scale",
                hint="a smaller one, or a larger initial_scale_power",
            )
        return self

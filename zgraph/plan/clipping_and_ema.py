"""What a plan says of the step around the optimizer: clipping and the average of weights. Nothing here imports torch."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, StrictBool, model_validator

from zgraph.errors import PlanError
from zgraph.record import Record

__all__ = ["EMA", "GradClip", "clip_of"]


class GradClip(Record, frozen=True):
    """Gradient clipping, as `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` do it, over all ranks.

    Norms are taken of the averaged gradients of all parameters together. A norm that is not finite makes every
    gradient NaN, as torch's clipping does, unless `error_if_nonfinite`, which raises `StepError` and waits for the
    device each step.
    """

    norm: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="the largest norm of all gradients together"
    )
    norm_type: Annotated[float, Field(gt=0)] = Field(default=2.0, description="which norm; inf for the largest element")
    value: Annotated[float, Field(gt=0)] | None = Field(default=None, description="the largest magnitude of an element")
    error_if_nonfinite: StrictBool = Field(default=False, description="raise where the norm is infinite or no number")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.norm is None and self.value is None:
            raise PlanError("clipping needs a norm or a value", hint="grad_clip=1.0 is norm=1.0; leave it out for none")
        if self.error_if_nonfinite and self.norm is None:
            raise PlanError(
                "error_if_nonfinite looks at the norm, and none is asked for",
                where="error_if_nonfinite",
                hint="give norm a value",
            )
        return self


class EMA(Record, frozen=True):
    """An exponential moving average of the weights, in float32: ema = decay * ema + (1 - decay) * weight, after each update."""

    decay: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.999, description="the share of the old average")


def clip_of(value: Any) -> Any:
    """Return a number as a record with that norm, and anything else as it is. Raises `PlanError` for a bool."""
    if isinstance(value, bool):
        raise PlanError(f"grad_clip can't be {value}", hint="a number, or a table with norm or value")
    return {"norm": value} if isinstance(value, (int, float)) else value


def decay_of(value: Any) -> Any:
    """Return a number as a record with that decay, and anything else as it is."""
    return {"decay": value} if isinstance(value, float) else value


Clip = Annotated[GradClip, BeforeValidator(clip_of)]
Average = Annotated[EMA, BeforeValidator(decay_of)]

"""Mixed precision of a plan: which dtype each kind of tensor has, and what the short names mean.

| | parameter | compute | reduce | gradients kept in | buffers | inputs | outputs |
| --- | --- | --- | --- | --- | --- | --- | --- |
| "bf16" | float32 | bfloat16 | float32 | float32 | as they are | cast | as computed |
| "fp16" | float32 | float16 | float32 | float32 | as they are | cast | float32 |
| with numerics "fsdp2" | float32 | low | low | float32 | as they are | cast | as computed |
| with numerics "deepspeed" | low + fp32 master | low | low | bfloat16 | low | as they are | as computed |

"fsdp2" is `fully_shard` with `MixedPrecisionPolicy(param_dtype=low)` (torch 2.13): shards are float32, gathered and
reduced in the low dtype. "deepspeed" is `bf16: {enabled: true}` or `fp16: {enabled: true}` (0.19): the model itself
is made low, buffers too, the optimizer keeps fp32 master weights made from the low ones, gradients are averaged in
the low dtype and accumulated in it: bfloat16, in half the memory, and farther from fp32 than `accumulate="float32"` of a
record. float16's are accumulated in float32: it holds small ones without the loss scale. fp16 outputs
are float32 by default, so that a loss computed outside the model has a tangent that half precision can hold once it
is scaled. Loss scaling belongs to fp16 in every mode. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, StrictBool

from zgraph.errors import PlanError
from zgraph.names import did_you_mean
from zgraph.plan.loss_scaling import LossScale
from zgraph.record import Record, short

__all__ = ["Precision", "precision_of", "preset"]

DType = Literal["float32", "bfloat16", "float16"]
LOW = ("bfloat16", "float16")
PRESETS = ("fp32", "bf16", "fp16")


class Precision(Record, frozen=True):
    """The dtypes of a training step. None is the model's own dtype, for `reduce` that of `compute`, and for `accumulate`
    float32 where parameters are low."""

    parameter: DType | None = Field(
        default=None, description="what ranks hold; bfloat16 or float16: with fp32 master weights"
    )
    compute: DType | None = Field(default=None, description="what weights are cast to, on the shard, before the gather")
    reduce: DType | None = Field(default=None, description="what gradients are averaged in")
    accumulate: Literal["float32", "bfloat16"] | None = Field(
        default=None, description="what the plan's optimizer adds micro-batches' gradients up in, and takes them in"
    )
    buffer: DType | None = Field(default=None, description="what floating-point buffers are cast to, once")
    output: DType | None = Field(default=None, description="what floating-point outputs are cast to")
    optimizer_state: DType = Field(default="float32", description="what elementwise optimizer states are stored in")
    cast_inputs: StrictBool = Field(default=True, description="whether floating-point inputs are cast to compute")
    keep_fp32: tuple[str, ...] = Field(
        default=(), description="patterns of parameter or module names whose modules compute in float32"
    )
    loss_scale: LossScale | None = Field(default=None, description="loss scaling; None: where compute is float16")

    def scaling(self) -> LossScale | None:
        """Return the loss scale to use, or None for none."""
        return self.loss_scale or (LossScale() if (self.compute or self.parameter) == "float16" else None)

    def dtype(self, field: str) -> Any:
        """Return the torch dtype of a field, or None where the field is None."""
        import torch

        name = getattr(self, field)
        return getattr(torch, name) if name is not None else None

    def state_dtype(self) -> Any:
        """Return the torch dtype of optimizer states."""
        return self.dtype("optimizer_state")


def precision_of(value: Any) -> Any:
    """Return a short name as it is, and a table as a record. Raises `PlanError` for an unknown name."""
    if isinstance(value, Precision):
        return value
    if isinstance(value, dict):
        return Precision.model_validate(value)
    if value not in PRESETS:
        hint = did_you_mean(value, PRESETS) if isinstance(value, str) else f"one of {', '.join(PRESETS)}, or a record"
        raise PlanError(f"there is no precision {short(value)}", hint=hint)
    return value


def preset(name: str, numerics: str | None) -> Precision:
    """Return what "fp32", "bf16" and "fp16" mean (the table above)."""
    if name == "fp32":
        return Precision()
    low: Any = {"bf16": "bfloat16", "fp16": "float16"}[name]
    if numerics == "fsdp2":
        return Precision(parameter="float32", compute=low, reduce=low)
    if numerics == "deepspeed":
        sums = {"accumulate": low} if name == "bf16" else {}
        return Precision(parameter=low, compute=low, reduce=low, buffer=low, cast_inputs=False, **sums)
    return Precision(parameter="float32", compute=low, reduce="float32", output="float32" if name == "fp16" else None)

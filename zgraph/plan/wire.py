"""What a plan says of the number of bits in which weights, gradients and activations are sent."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field, StrictBool, StrictInt, model_validator

from zgraph.errors import PlanError
from zgraph.record import Record

__all__ = ["Wire"]

Format = Literal["same", "bf16", "fp16", "fp8", "int8", "int4"]
Rounding = Literal["nearest", "stochastic"]


class Wire(Record, frozen=True):
    """In how many bits weights are gathered, gradients scattered and activations sent. Formats with 8 and 4 bits have a
    scale for each block of elements."""

    gather: Format = Field(default="same", description="of weights, where a rank's shard is sent to the others")
    reduce: Format = Field(default="same", description="of gradients, where they are sent to the rank that keeps them")
    activations: Format = Field(
        default="same",
        description="of what pipeline stages send each other, and ranks of tensor and context parallelism: activations, and in the backward "
        "their gradients",
    )
    block: StrictInt = Field(default=256, ge=8, le=1 << 20, description="elements for each scale (of 4 bytes)")
    rounding: Rounding = Field(
        default="nearest",
        description="of gradients: to the nearest number of the format, or up or down by chance, so that they are right on average. "
        "(Weights are always rounded to the nearest.)",
    )
    error_feedback: StrictBool = Field(
        default=False,
        description="whether a rank adds what a gradient lost by being sent in few bits to the next one (EF-SGD)",
    )
    hierarchical: StrictBool = Field(
        default=False,
        description="whether gradients are reduced as they are within a group of mesh.dp (the devices of a node), and in few bits between the "
        "groups alone (mesh.replicate: the nodes), as in ZeRO++'s qgZ",
    )
    auto: StrictBool = Field(
        default=False,
        description="whether the compiler chooses gather and reduce itself: of the formats that max_error allows those by which the step is "
        "forecast to be fastest, and as they are where none makes it faster",
    )
    max_error: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        examples=[0.005],
        description="with auto: the most that an element of a weight or gradient may be wrong by being sent, as a part of the largest element "
        "of its block",
    )
    secondary: StrictInt | None = Field(
        default=None,
        ge=2,
        examples=[8],
        description="ranks of mesh.dp, one after the other, that share a node: they keep a second copy of the weights between them from the forward "
        "to the backward, which gathers from them alone (ZeRO++'s hpZ)",
    )
    exact: tuple[str, ...] = Field(
        default=(), description="patterns of names of parameters that are sent as they are, with their gradients"
    )

    @model_validator(mode="before")
    @classmethod
    def _say_how_it_is_written(cls, given: Any) -> Any:
        if not isinstance(given, str):
            return given
        record = '{"auto": True, "max_error": 0.005}'
        if given in get_args(Format):
            record = f'{{"gather": "{given}", "reduce": "{given}"}}'
        raise PlanError(
            f"{given!r} is no record", why="weights and gradients have a format each", hint=f"wire={record}"
        )

    @property
    def compresses(self) -> bool:
        """Whether anything is sent in fewer bits, or may be."""
        return self.auto or (self.gather, self.reduce, self.activations) != ("same", "same", "same")

    @property
    def reduces(self) -> bool:
        """Whether gradients are sent in fewer bits, or may be."""
        return self.auto or self.reduce != "same"

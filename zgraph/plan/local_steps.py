"""What a plan says of local steps: how rarely groups of ranks come together, and how. Nothing here imports torch."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, StrictInt

from zgraph.errors import PlanError
from zgraph.plan.optimizers import SGD, Optimizer
from zgraph.plan.wire import Format
from zgraph.record import Record

__all__ = ["LocalSteps"]

OUTER_RATE = 0.7  # the paper's learning rate of the outer optimizer (Douillard et al., 2023, section 3)


def _with_rate(outer: Any) -> Any:
    """Return an outer optimizer with the paper's learning rate where none is given. Raises `PlanError` for another than
    SGD."""
    name = outer.name if isinstance(outer, Optimizer) else outer.get("name") if isinstance(outer, dict) else None
    if name not in (None, "SGD"):
        raise PlanError(
            f"the outer optimizer of local steps is SGD, not {name}",
            why="it steps by the mean of what groups of ranks have moved, and keeps one momentum at most",
            hint="zgraph.SGD(lr=0.7, momentum=0.9, nesterov=True)",
        )
    if isinstance(outer, SGD) and "lr" not in outer.model_fields_set:
        return outer.model_copy(update={"lr": OUTER_RATE})
    return {"lr": OUTER_RATE, **outer} if isinstance(outer, dict) else outer


def _check_outer(outer: SGD) -> SGD:
    for field in ("groups", "maximize"):
        if getattr(outer, field):
            raise PlanError(
                f"the outer optimizer of local steps has {field}",
                where=field,
                why="it does the same for all parameters: it goes where groups of ranks have gone",
                hint="leave it out",
            )
    return outer


class LocalSteps(Record, frozen=True):
    """DiLoCo (Douillard et al., 2023): each group of ranks (`mesh.replicate`) trains by itself, and after some steps
    all go on from where an outer optimizer steps to, by the mean of what the groups have moved."""

    every: Annotated[StrictInt, Field(ge=1)] = Field(
        examples=[8], description="steps in a round, at whose end groups come together"
    )
    outer: Annotated[SGD, BeforeValidator(_with_rate), AfterValidator(_check_outer)] = Field(
        examples=[{"name": "SGD", "momentum": 0.9, "nesterov": True}],
        default=SGD(lr=OUTER_RATE, momentum=0.9, nesterov=True),
        description="the optimizer that steps from where the round began; its learning rate is 0.7 if none is given",
    )
    wire: Format = Field(
        examples=["int8"],
        default="same",
        description="in how many bits groups send what they have moved, as wire.reduce: in blocks of wire.block, but for wire.exact",
    )

    def ends_at(self, step: int) -> bool:
        """Return whether a round ends with this step, which counts from 1."""
        return step % self.every == 0

"""What a plan says of elastic runs: the rows of a step are the same for any number of ranks, and micro-batches are
chosen to fit.

A step's rows are ranks x micro-batches x rows of a micro-batch, as in DeepSpeed's elasticity. Nothing here imports
torch.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, StrictInt, model_validator

from zgraph.errors import PlanError
from zgraph.record import Record, short

__all__ = ["Elastic", "divisors", "shown_worlds"]

Count = Annotated[StrictInt, Field(ge=1)]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _counts(value: Any) -> Any:
    """Return a list of numbers as a tuple, the smallest first, each once. Raises `PlanError` for anything else."""
    if not isinstance(value, (list, tuple)) or not value or not all(map(_is_count, value)):
        raise PlanError(
            f"{short(value)} is no list of whole numbers from 1", hint="such as [1, 2, 4]; leave it out for any"
        )
    return tuple(sorted(set(value)))


def _count_or_counts(value: Any) -> Any:
    return value if value is None or _is_count(value) else _counts(value)


class Elastic(Record, frozen=True):
    """A batch of a fixed number of rows for each optimizer step, whatever the number of ranks.

    Every rank gets the same number of rows, in the fewest micro-batches of equal size that are allowed. A step is then
    the mean over the same rows on any allowed number of ranks: one that divides the batch, and is in `worlds`.
    """

    batch: Count = Field(description="rows of one optimizer step over all ranks")
    micro_batch: Annotated[Count | tuple[Count, ...] | None, BeforeValidator(_count_or_counts)] = Field(
        default=None,
        description="the most rows of one micro-batch of a rank; or a list of the sizes that one may have; none: all rows of a rank",
    )
    worlds: Annotated[tuple[Count, ...], BeforeValidator(_counts)] | None = Field(
        default=None, description="the numbers of ranks that may be; none: all that divide the batch"
    )
    rows: Count | None = Field(
        default=None, description="rows of a step on each rank: filled in for the ranks that there are"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if isinstance(self.micro_batch, tuple) and all(self.batch % size for size in self.micro_batch):
            raise PlanError(
                f"no size of a micro-batch divides a batch of {self.batch}",
                where="micro_batch",
                hint=f"{_either(self.micro_batch)} times a whole number for batch",
            )
        if self.rows is not None and (self.batch % self.rows or self.parts(self.rows) is None):
            raise PlanError(
                f"no number of ranks has {self.rows} of {self.batch} rows each", where="rows", hint="leave it out"
            )
        return self

    def parts(self, rows: int) -> int | None:
        """Return the fewest micro-batches of equal and allowed size that make up `rows` rows, or None if there are
        none."""
        if isinstance(self.micro_batch, tuple):
            return next((rows // size for size in reversed(self.micro_batch) if rows % size == 0), None)
        least = 1 if self.micro_batch is None else -(-rows // self.micro_batch)
        return next(parts for parts in divisors(rows) if parts >= least)

    def refusal(self, world: int, ranks: int) -> str | None:
        """Return why this batch can't run on `world` ranks, of which `ranks` see different rows, or None if it can."""
        if self.worlds is not None and world not in self.worlds:
            return f"worlds names {shown_worlds(self.worlds, world)} and no other"
        if self.batch % ranks:
            return f"{ranks} ranks would not have the same number of rows each"
        if self.parts(self.batch // ranks) is None:
            return f"a rank has {self.batch // ranks} rows, and micro-batches have {_either(self.micro_batch)}"
        return None


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, the smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def shown_worlds(worlds: tuple[int, ...], near: int, most: int = 12) -> str:
    """Return numbers of ranks as text for a message: all, or the `most` that are nearest to `near`."""
    shown = sorted(sorted(worlds, key=lambda world: abs(world - near))[:most])
    return ", ".join(map(str, shown)) + (f" (nearest of {len(worlds)})" if len(shown) < len(worlds) else "")


def _either(sizes: object) -> str:
    return " or ".join(map(str, sizes)) if isinstance(sizes, tuple) else str(sizes)

"""What a plan says of sizes that differ from call to call. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, StrictFloat, StrictInt, model_validator

from zgraph.errors import PlanError
from zgraph.names import did_you_mean
from zgraph.record import Record, Table, short

__all__ = ["Buckets", "Dynamic", "Hot", "Pad", "Size", "buckets_of", "hot_of", "shapes_of"]


FIXED_BY: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("mesh.cp", lambda plan: plan.mesh.get("cp", 1) != 1, "context parallelism divides sequences of one length"),
    ("tiles", lambda plan: bool(plan.tiles), "tiles cut values of one size"),
)
"""The fields of a plan that need a program of its own for each size: where, when, and why."""


def fixed_by(plan: Any) -> tuple[str, str] | None:
    """Return (the field, why) if a field makes all sizes of a plan's programs numbers, or None."""
    return next(((where, why) for where, when, why in FIXED_BY if when(plan)), None)


def _name(given: str) -> str:
    if not given.isidentifier():
        raise PlanError(f"{given!r} is no name of a size", hint='a name as Python has them: "batch", "seq"')
    return given


class Size(Record, frozen=True):
    """A size that differs from call to call, by name: sizes of one name are equal in every call.

    Without `max` no bound is known; without `typical` decisions about time are made for the size of the first call. It
    is at least 2: a size of 1 is a program of its own.
    """

    name: Annotated[str, AfterValidator(_name)] = Field(description='its name: "seq"')
    max: Annotated[StrictInt, Field(ge=2)] | None = Field(default=None, description="the largest that it will be")
    typical: Annotated[StrictInt, Field(ge=2)] | None = Field(
        default=None, description="the one for which decisions about time are made"
    )

    def __init__(self, name: str | None = None, /, **values: Any) -> None:
        super().__init__(**({} if name is None else {"name": name}), **values)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max is not None and self.typical is not None and self.typical > self.max:
            raise PlanError(f"size {self.name!r} is typically {self.typical}, and {self.max} at most")
        return self


def _size(given: Any) -> Any:
    return {"name": given} if isinstance(given, str) else given


VALUE = "value"
"""Marks an argument of `forward` whose values are constants of a program."""


def _dimensions(given: Any) -> Any:
    """Return dimensions as files can write them: in order, as text."""
    if given == VALUE:
        return given
    if not isinstance(given, Mapping):
        raise PlanError(
            f"{short(given)} is no table from dimensions to sizes", hint='such as {0: "batch", 1: "seq"}, or "value"'
        )
    wrong = [d for d in given if not str(d).isdecimal()]
    if wrong:
        raise PlanError(f"{wrong[0]!r} is no dimension", hint="dimensions count from 0")
    return {str(d): given[d] for d in sorted(given, key=int)}


Dimensions = dict[str, Annotated[Size, BeforeValidator(_size)]]

Dynamic = dict[str, Annotated[Dimensions | Literal["value"], BeforeValidator(_dimensions)]]
"""Sizes by dimension, or "value", by the name of the argument of forward."""


def sizes_in(dynamic: Mapping[str, Any]) -> dict[str, Dimensions]:
    """Return the arguments that have declared sizes, with these."""
    return {argument: told for argument, told in dynamic.items() if told != VALUE}


def values_in(dynamic: Mapping[str, Any]) -> frozenset[str]:
    """Return the arguments whose values are declared to be constants."""
    return frozenset(argument for argument, told in dynamic.items() if told == VALUE)


def declared(dynamic: Dynamic) -> dict[str, Size]:
    """Return each size by its name, from the place that says most about it. Raises `PlanError` where places differ."""
    sizes: dict[str, Size] = {}
    for argument, dimensions in sizes_in(dynamic).items():
        for size in dimensions.values():
            known = sizes.get(size.name)
            told = [s for s in (known, size) if s is not None and (s.max, s.typical) != (None, None)]
            if len(told) == 2 and told[0] != told[1]:
                raise PlanError(f"size {size.name!r} is given twice, and differently", where=f"dynamic.{argument}")
            sizes[size.name] = told[0] if told else size
    return sizes


UNPADDED = "none"
"""Marks an input that is not padded, though one of its dimensions may have the padded size by chance."""


class Pad(Record, frozen=True):
    """How an input is padded: with which value, at the end of which dimensions, and to which size. Sizes of one name
    are equal in every call."""

    value: StrictBool | StrictInt | StrictFloat = Field(description="what is put behind its own values")
    dims: tuple[Annotated[StrictInt, Field(ge=0)], ...] = Field(
        default=(1,), min_length=1, description="the dimensions that are padded, counted from 0"
    )
    size: Annotated[str, AfterValidator(_name)] = Field(
        default="length", description="the name of the size: inputs of one name are padded to one bucket"
    )


def _pad(given: Any) -> Any:
    if isinstance(given, str) and given != UNPADDED:
        raise PlanError(
            f"{short(given)} is no padding",
            hint='a number, a record with value, dims and size, or "none": it is not padded',
        )
    if isinstance(given, (Pad, str)):
        return given
    return Pad.model_validate(dict(given) if isinstance(given, Mapping) else {"value": given})


def _ascending(buckets: tuple[int, ...]) -> tuple[int, ...]:
    wrong = next((b for a, b in zip((0, *buckets), buckets, strict=False) if b <= a), None)
    if not buckets or wrong is not None:
        why = (
            "there is none"
            if wrong is None
            else f"{wrong} is not larger than {'0' if wrong < 1 else 'the one before it'}"
        )
        raise PlanError("buckets are positive sizes in ascending order", why=why, hint="such as [256, 512, 1024]")
    return buckets


class Buckets(Record, frozen=True):
    """Sizes that inputs are padded to within a call: the next of the `buckets` that holds the batches of all ranks."""

    buckets: Annotated[tuple[StrictInt, ...], AfterValidator(_ascending)] = Field(
        description="the sizes, in ascending order"
    )
    pad: Annotated[
        dict[str, Annotated[Pad | Literal["none"], BeforeValidator(_pad)]],
        AfterValidator(Table),
    ] = Field(
        description="a table from arguments of forward to what they are padded with: a number, or a record with value, dims and size; "
        '"none" for one that is not padded'
    )

    @model_validator(mode="after")
    def _pads(self) -> Self:
        if not self.padded():
            raise PlanError(
                "no input is padded", where="pad", hint='such as {"input_ids": 0, "attention_mask": 0, "labels": -100}'
            )
        return self

    def padded(self) -> dict[str, Pad]:
        """Return the inputs that are padded."""
        return {name: pad for name, pad in self.pad.items() if isinstance(pad, Pad)}


def _points(given: Any) -> Any:
    if isinstance(given, (list, tuple)) and not all(isinstance(point, Mapping) and point for point in given):
        raise PlanError(
            "hot sizes are tables from the names of sizes to numbers",
            hint='such as [{"batch": 8, "seq": 512}]; or how many',
        )
    return given


class Hot(Record, frozen=True):
    """Sizes that occur often: each gets a static program of its own, beside the one that serves all sizes."""

    hot: Annotated[
        Annotated[StrictInt, Field(ge=1)]
        | tuple[Annotated[dict[str, Annotated[StrictInt, Field(ge=2)]], AfterValidator(Table)], ...],
        BeforeValidator(_points),
    ] = Field(
        description="how many of the sizes that were called for most often, or a list of tables from names of sizes to numbers"
    )


def shapes_of(given: Any) -> Any:
    """Return a word as it is, and a table as `Buckets` or `Hot`. Raises `PlanError` for anything else."""
    words = ("auto", "static", "dynamic")
    if isinstance(given, (Buckets, Hot)):
        return given
    if isinstance(given, Mapping):
        return (Hot if "hot" in given else Buckets).model_validate(dict(given))
    if given not in words:
        near = f"{did_you_mean(given, words)}; or " if isinstance(given, str) else ""
        raise PlanError(
            f"{short(given)} can't be the value of shapes",
            hint=f'{near}"auto", "static", "dynamic", or a record: {{"buckets": [256, 512], "pad": {{"input_ids": 0}}}}, {{"hot": 2}}',
        )
    return given


def buckets_of(plan: Any) -> Buckets | None:
    """Return what a plan pads to, or None where it pads nothing."""
    return plan.shapes if isinstance(plan.shapes, Buckets) else None


def hot_of(plan: Any) -> Hot | None:
    """Return which sizes of a plan have static programs of their own as well, or None where none have."""
    return plan.shapes if isinstance(plan.shapes, Hot) else None


def hot_names(plan: Any) -> tuple[str, ...]:
    """Return the names of the sizes for which a plan asks for static programs of their own."""
    hot = hot_of(plan)
    points = hot.hot if hot is not None and not isinstance(hot.hot, int) else ()
    return tuple(dict.fromkeys(name for point in points for name in point))

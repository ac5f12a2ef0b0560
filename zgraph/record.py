"""`Record`: the base of everything that a plan is made of: frozen, no unknown keys, every fault a `PlanError`.

Nothing here imports torch.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, Self, TypeVar

from pydantic import BaseModel, ValidationError

from zgraph.errors import ArgumentError, PlanError
from zgraph.names import did_you_mean

__all__ = ["Record", "Table", "did_you_mean", "joined", "short"]


_Value = TypeVar("_Value")


class Table(dict[str, _Value]):
    """A dict that can't be changed, like everything in a plan."""

    _field = "dynamic"

    def _frozen(self, *_: object, **__: object) -> NoReturn:
        raise PlanError(f"a plan's {self._field} can't be changed", where=self._field, hint="make another plan")

    __setitem__ = __delitem__ = __ior__ = _frozen  # type: ignore[assignment]
    clear = pop = popitem = setdefault = update = _frozen  # type: ignore[assignment]

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))

    def __reduce__(self) -> tuple[type[Self], tuple[dict[str, _Value]]]:
        return type(self), (dict(self),)  # the default would fill an empty one item by item

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


class Record(BaseModel, frozen=True, extra="forbid"):
    """The base of `Plan` and of the records inside it: frozen, no unknown keys, every fault a `PlanError`."""

    def __new__(cls, *given: Any, **_: Any) -> Self:
        if given and cls.__init__ is Record.__init__:
            first = next((name for name in cls.model_fields if name != "name"), None)
            raise ArgumentError(
                f"{cls.__name__} takes its fields by name, and was given a value of type {type(given[0]).__name__} without one",
                hint=f"{cls.__name__}({first}=…)" if first is not None else None,
            )
        return super().__new__(cls)

    def __init__(self, **values: Any) -> None:
        with _plan_errors(type(self)):
            super().__init__(**values)

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        with _plan_errors(cls):
            return super().model_validate(obj, **options)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        with _plan_errors(cls):
            return super().model_validate_json(json_data, **options)

    @classmethod
    def model_validate_strings(cls, obj: Any, **options: Any) -> Self:
        with _plan_errors(cls):
            return super().model_validate_strings(obj, **options)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields replaced. Unlike pydantic's own, it checks the new values."""
        if not update:
            return super().model_copy(deep=deep)
        return type(self)(**{name: getattr(self, name) for name in self.model_fields_set} | dict(update))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self).model_fields:
            self._refuse_change(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in type(self).model_fields:
            self._refuse_change(name)
        super().__delattr__(name)

    def _refuse_change(self, name: str) -> NoReturn:
        raise PlanError(
            f"a {type(self).__name__} can't be changed",
            where=name,
            why="compiled programs were made from it",
            hint=f"make another: plan.model_copy(update={{{name!r}: …}})",
        )

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """Yield only the fields that differ from the defaults."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value != field.get_default(call_default_factory=True):
                yield name, value


# Errors: pydantic's, as zgraph's own.


@contextmanager
def _plan_errors(record: type[Record]) -> Iterator[None]:
    try:
        yield
    except TypeError as error:  # (pydantic calls the constructor of a record inside of another with its keys)
        if "keywords must be strings" not in str(error):
            raise
        raise PlanError(
            f"a key of {record.__name__}, or of a record in it, is no text", hint="keys are names of fields"
        ) from None
    except ValidationError as error:
        raise joined([problem for detail in error.errors() for problem in _problems(record, detail)]) from None


def joined(problems: list[PlanError]) -> PlanError:
    if len(problems) == 1:
        return problems[0]
    error = PlanError(f"the plan has {len(problems)} errors", why="\n".join(str(problem) for problem in problems))
    error.problems = tuple(problems)
    return error


def _problems(record: type[Record], detail: Any) -> Iterator[PlanError]:
    """Yield one of pydantic's error details as `PlanError`s; several if an inner record reported several."""
    location = [part for part in detail["loc"] if part != "[key]"]
    where = _key_path(location)
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, PlanError):  # from a check of ours, which may be that of an inner record
        for problem in cause.problems or (cause,):
            inner = _key_path([*location, problem.where] if problem.where else location)
            yield type(problem)(problem.what, where=inner, why=problem.why, hint=problem.hint)
    elif detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        key = str(location[-1])
        yield PlanError(f"unknown key {key!r}", where=where, hint=did_you_mean(key, record.model_fields))
    else:
        field = record.model_fields.get(str(location[0])) if location else None
        yield PlanError(
            f"{short(detail['input'])} can't be the value of {where or 'a ' + record.__name__}",
            where=where,
            why=detail["msg"],
            hint=f"{location[0]}: {field.description}" if field is not None and field.description else None,
        )


def _key_path(parts: list[Any]) -> str | None:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return path.removeprefix(".") or None


def short(value: Any) -> str:
    return reprlib.repr(value)

"""Arguments of DeepSpeed's classes, by a table of their names and values, in DeepSpeed's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zgraph.errors import PlanError
from zgraph.names import did_you_mean


def by_name(
    kind: str, first: str, defaults: Mapping[str, Any], values: Sequence[Any], named: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the given arguments of a class after its `first` one, by their names.

    Raises `PlanError` for too many, and for names that the class does not have.
    """
    known = list(defaults)
    if len(values) > len(known):
        raise PlanError(f"{kind} takes {len(known)} arguments after {first}", hint=", ".join(known))
    given = dict(zip(known, values, strict=False)) | dict(named)
    for name in given:
        if name not in known:
            raise PlanError(f"{kind} has no argument {name!r}", where=name, hint=did_you_mean(name, known))
    return given

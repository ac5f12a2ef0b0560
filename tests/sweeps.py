"""Sweeps: tests over many cases, of which `make test` runs a few and `make test-all` every one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def sweep(names: str, values: Iterable[Any], *, quick: int, **how: Any) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize(names, values, **how)`, where all cases but `quick` of them are marked slow.

    Those that are not are spread evenly: the first, the last and some between; of one, the last.
    """
    values = list(values)
    last = len(values) - 1
    assert 0 < quick <= last, f"{quick} of {last + 1} cases"
    kept = {last} if quick == 1 else {round(at * last / (quick - 1)) for at in range(quick)}
    several = "," in names
    found = []
    for at, value in enumerate(values):
        if at not in kept:
            if not hasattr(value, "marks"):
                value = pytest.param(*value) if several else pytest.param(value)
            value = pytest.param(*value.values, marks=[*value.marks, pytest.mark.slow], id=value.id)
        found.append(value)
    return pytest.mark.parametrize(names, found, **how)


def in_turn(values: Sequence[Any], *others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Each of the values once, with the others' in turn: all values and all options, where their product would take too long."""
    found = []
    for at, value in enumerate(values):
        row = [value]
        for options in others:
            at, chosen = divmod(at, len(options))
            row.append(options[chosen])
        found.append(tuple(row))
    return found

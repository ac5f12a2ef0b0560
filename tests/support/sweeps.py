"""Sweeps: tests over many cases, of which `make test` runs a few and `make test-all` every one."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pytest


def sweep(names: str, values: Iterable[Any], *, quick: int | Collection[int], **how: Any) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize(names, values, **how)`, where all cases but `quick` of them are marked slow.

    A number is of cases that are spread evenly: the first, the last and some between; of one, the last. A collection
    holds the positions of those that are quick.
    """
    values = list(values)
    last = len(values) - 1
    if isinstance(quick, int):
        kept = {last} if quick == 1 else {round(at * last / (quick - 1)) for at in range(quick)}
    else:
        kept = set(quick)
    assert kept and len(kept) <= last, f"{len(kept)} of {last + 1} cases"
    assert all(0 <= at <= last for at in kept), f"there are {last + 1} cases"
    several = "," in names
    found = []
    for at, value in enumerate(values):
        if at not in kept:
            if not hasattr(value, "marks"):
                value = pytest.param(*value) if several else pytest.param(value)
            value = pytest.param(*value.values, marks=[*value.marks, pytest.mark.slow], id=value.id)
        found.append(value)
    return pytest.mark.parametrize(names, found, **how)


def product(names: str, *options: Sequence[Any], together: int = 2, **how: Any) -> pytest.MarkDecorator:
    """A sweep over all combinations of the options, where those are quick that `cover` them."""
    cases = list(itertools.product(*options))
    return sweep(names, cases, quick=cover([len(values) for values in options], together), **how)


def chosen(*options: Sequence[Any], together: int = 2) -> list[tuple[Any, ...]]:
    """Those of all combinations of the options that `cover` them."""
    cases = list(itertools.product(*options))
    return [cases[at] for at in cover([len(values) for values in options], together)]


def cover(sizes: Sequence[int], together: int = 2) -> list[int]:
    """Positions in the product of `sizes` options with which any `together` options' values meet: with 1, each value is there."""
    cases = list(itertools.product(*(range(size) for size in sizes)))
    return covering(range(len(cases)), cases.__getitem__, together=together)


def covering(seeds: Iterable[int], drawn: Callable[[int], Sequence[Any]], *always: int, together: int = 2) -> list[int]:
    """Of these seeds few with which any `together` options still meet that meet in what one of them has drawn, and `always`."""
    options = {seed: drawn(seed) for seed in seeds}
    bits: dict[Any, int] = {}  # the number of each meeting (sets take four times as long, in all that import a test)

    def meet(found: Sequence[Any]) -> int:
        all_places = itertools.combinations(range(len(found)), min(together, len(found)))
        each = ((places, tuple(found[at] for at in places)) for places in all_places)
        return functools.reduce(operator.or_, (1 << bits.setdefault(meeting, len(bits)) for meeting in each), 0)

    meetings = {seed: meet(found) for seed, found in options.items()}
    kept = list(always)
    left = functools.reduce(lambda rest, seed: rest & ~meetings[seed], kept, (1 << len(bits)) - 1)
    while left:
        kept.append(max(meetings, key=lambda seed: ((meetings[seed] & left).bit_count(), -seed)))
        left &= ~meetings[kept[-1]]
    return sorted(kept)


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

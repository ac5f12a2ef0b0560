"""Compiles static programs for sizes that occur often, beside the one that serves all sizes: the sizes that the plan
names, or the most frequent.

All ranks compile the same ones. In each step, each rank runs the one for its own sizes; the collectives are the same in
all.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zgraph.build.programs_of_one_step import add_hot
from zgraph.build.step_program import Entry, StepProgram
from zgraph.names import did_you_mean
from zgraph.plan.shapes import hot_of
from zgraph.program.sizes import Sizes
from zgraph.runtime.rank import Rank

logger = logging.getLogger(__name__)

FIRST_LOOK = 32  # calls before ranks first look for frequent sizes; they look again after twice as many, and so on
LEAST_SHARE = 0.05  # of a program's calls: sizes with a smaller share get no program of their own
COUNTED = 4096  # sizes of a program whose calls are counted; beyond, the rarer half is forgotten

Point = tuple[int, ...]


class HotSizes:
    """The programs of one compiled module for certain sizes, compiled by `make`."""

    def __init__(self, rank: Rank, make: Callable[[StepProgram], None]) -> None:
        self.rank = rank
        hot = hot_of(rank.plan)
        self.asked = hot.hot if hot is not None else ()
        self._make = make
        self._counts: dict[str, Counter[Point]] = {}  # calls by their sizes, for each program that serves several
        self._names: set[str] = set()  # the sizes of all programs so far
        self._told: set[str] = set()  # those that the plan names, no program had so far, and the user was told of
        self._calls = 0
        self._look = FIRST_LOOK

    def made(self, step: StepProgram) -> None:
        """Compile a new program's variants for the sizes that the plan names. All ranks must call it."""
        self._names.update(step.captured.sizes.names)
        if not step.captured.sizes or isinstance(self.asked, int):
            return
        for given in self.asked:
            if (point := self._named(step, given)) is not None:
                self._add(step, point)

    def chosen(self, step: StepProgram, flat: Sequence[Any]) -> StepProgram:
        """Return the program for a call with these flat inputs: the one for exactly its sizes, if there is one. Count
        the sizes.
        """
        if isinstance(self.asked, int) and step.captured.sizes:
            counts = self._counts.setdefault(step.name, Counter())
            counts[step.captured.sizes.key(flat)] += 1
            if len(counts) > COUNTED:
                self._counts[step.name] = Counter(dict(counts.most_common(COUNTED // 2)))
        return step.for_call(flat)

    def called(self, entries: Mapping[str, Entry], *, begins: bool) -> None:
        """Count a call; now and then compile programs for frequent sizes, on all ranks together. `begins` is true
        unless the call is inside a step. All ranks must call it.
        """
        self._calls += 1
        if not isinstance(self.asked, int) or self._calls < self._look or not begins:
            return
        self._look = 2 * self._calls
        programs = [entry.program() for entry in entries.values()]
        self._counts = {step.name: self._counts[step.name] for step in programs if step.name in self._counts}
        views = self.rank.everyone.gather("how often sizes occurred", self._counts)
        for step in programs:
            counts: Counter[Point] = sum((view[step.name] for view in views if step.name in view), Counter())
            for point in self._frequent(step, counts):
                self._add(step, dict(zip(step.captured.sizes.names, point, strict=True)))

    def _frequent(self, step: StepProgram, counts: Counter[Point]) -> list[Point]:
        """Return the most frequent sizes that have no program yet, up to the number that the plan allows."""
        assert isinstance(self.asked, int)
        worth = [(-n, point) for point, n in counts.items() if n >= LEAST_SHARE * counts.total() and n > 1]
        return [point for _, point in sorted(worth) if point not in step.hot][: self.asked - len(step.hot)]

    def _named(self, step: StepProgram, given: Mapping[str, int]) -> dict[str, int] | None:
        """Return sizes that the plan names in the form that the program has them, or None, with a warning, if the
        program does not take them.
        """
        sizes: Sizes = step.captured.sizes
        if not given.keys() <= set(sizes.names):
            self._tell_unknown(step, given)
            return None
        why = ", ".join(f"{name} is not said" for name in sizes.needed if name not in given)
        point = sizes.point(given)
        if not why and not sizes.hold(point):
            why = f"the program holds where {sizes.broken(point)[0]}"
        if why and self.rank.everyone.first():
            shown = ", ".join(f"{n}={size}" for n, size in given.items())
            logger.warning("shapes.hot: %s has no program of its own for %s: %s", step.name, shown, why)
        return None if why else point

    def _tell_unknown(self, step: StepProgram, given: Mapping[str, int]) -> None:
        """Warn of sizes that the plan names and that no program had so far. (Where another program has one it is 1, and a
        number, in this one.)
        """
        sizes = step.captured.sizes.needed
        for name in sorted(given.keys() - self._names - self._told):
            self._told.add(name)
            if self.rank.everyone.first():
                logger.warning(
                    "shapes.hot: %s has no size %r (one that was equal to another in every call so far has the name of that one); %s",
                    step.name,
                    name,
                    did_you_mean(name, sizes),
                )

    def _add(self, step: StepProgram, point: dict[str, int]) -> None:
        rank = self.rank
        shown = ", ".join(f"{n}={size}" for n, size in point.items())
        rank.relax()
        refused = add_hot(step, point)
        if rank.everyone.first():
            if refused is None:
                logger.warning("%s has a program of its own for %s", step.name, shown)
            else:
                logger.warning(
                    "%s has no program of its own for %s: it would communicate otherwise: %s", step.name, shown, refused
                )
        if refused is None:
            self._make(step.hot[tuple(point.values())])

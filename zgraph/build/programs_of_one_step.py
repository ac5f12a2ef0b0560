"""Programs that run in one step beside each other: one rank runs one of them, another rank another.

Ranks do so when no one program serves all their batches (a single row beside several). Every rank makes all of these
programs, in one order, so that what ranks have made stays equal. The collectives over ranks that have different rows
must be the same in each, in the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from zgraph.build.compare_collectives import difference, refuse_unlike
from zgraph.build.pass_pipeline import Variant
from zgraph.build.step_program import Entry, StepProgram, together

logger = logging.getLogger(__name__)


def pair_programs(entries: Sequence[Entry]) -> None:
    """Let ranks run any program of these entries in one step.

    A program whose collectives differ from the first one's is made anew in the first one's order, and so are its
    programs for certain sizes alone. Raises `RankMismatchError` where that is impossible.
    """
    leader = max(entries, key=lambda entry: (len(entry.beside), len(entry.trace.sizes)))
    group = tuple(dict.fromkeys(one for entry in (leader, *entries) for one in entry.beside))
    if all(len(one.beside) == len(group) for one in group):
        return
    anew: list[tuple[StepProgram, StepProgram]] = []
    outputs = dict.fromkeys(entry.in_other(leader, step.pattern) for entry in group for step in entry.programs())
    for pattern in outputs:
        first, *others = (entry.program(leader.in_other(entry, pattern)) for entry in group)
        for entry, step in zip(group[1:], others, strict=True):
            if any(difference(first, step, variant) for variant in _variants((first, step))):
                anew.append((step, entry.follow(step, first)))
                step = anew[-1][1]
            for variant in _variants((first, step)):
                refuse_unlike((first, step), variant)
    for entry in group:
        entry.pattern = leader.in_other(entry, leader.pattern)
        _link(entry, group)
    for before, after in anew:
        for point in before.hot:
            if (refused := add_hot(after, dict(zip(after.captured.sizes.names, point, strict=True)))) is not None:
                logger.warning(
                    "%s is left out from now on: it would communicate otherwise: %s", before.hot[point].name, refused
                )


def _variants(steps: Sequence[StepProgram]) -> list[Variant]:
    return list(dict.fromkeys(variant for step in steps for variant in step.variants_made()))


def add_hot(step: StepProgram, point: Mapping[str, int]) -> str | None:
    """Make a program of its own for these sizes, and let ranks run it; return None.

    If its collectives differ from those of the program for all sizes, drop it and return the difference.
    """
    hot_step = step.at(point)
    for variant in dict.fromkeys([*step.variants(), *_variants(step.beside)]):
        if mismatch := difference(step, hot_step, variant):
            return f"{mismatch[0]}: {mismatch[1]}"
    step.hot[tuple(point.values())] = hot_step
    together([one for one in step.beside if one.symbolic is one])
    return None


def leave(gone: Entry) -> None:
    """Remove an entry from the groups of those that it was beside."""
    for entry in gone.beside:
        if entry is not gone:
            _link(entry, tuple(one for one in entry.beside if one is not gone))


def _link(entry: Entry, group: tuple[Entry, ...]) -> None:
    entry.beside = group
    for step in entry.programs():
        together([step if one is entry else one.program(entry.in_other(one, step.pattern)) for one in group])

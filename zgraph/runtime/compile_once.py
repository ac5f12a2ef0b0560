"""A program that no rank has kept is made by one of those that share a cache folder; the others take it from there.

Nobody has to: what a rank does not find it makes itself, and the votes before a program first runs compare what ranks have, wherever that is from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from zgraph.build.build_context import tell_nobody
from zgraph.build.step_program import Entry, StepProgram
from zgraph.runtime.rank import Rank

logger = logging.getLogger(__name__)

View = tuple[str, str, bool]  # a rank's folder, the key of its step in it, and whether something is kept of that


def make_once(rank: Rank, entry: Entry) -> None:
    """Let one rank of each folder make the program of an entry that is not kept there. All ranks must call it."""
    agreement, keeper = rank.agreement, rank.keeper
    if not agreement.ranks or not agreement.any("whether programs are kept", keeper is not None):
        return
    mine: View | None = None
    if keeper is not None:
        step = keeper.step(entry.trace, entry.pattern, entry.name, entry.context)
        mine = (keeper.store.identity(), step.key, step.facts is not None) if step is not None else None
    views: list[View | None] = agreement.gather("what is kept of a program", mine)
    makers = makers_of(views)
    if not makers:
        return
    if agreement.rank() in makers:
        _make(entry)
    agreement.gather("that a program was made", None)


def makers_of(views: Sequence[View | None]) -> list[int]:
    """The ranks that make something: of those with the same folder and key, where none has found it, the first."""
    found = {view[:2] for view in views if view is not None and view[2]}
    first: dict[tuple[str, str], int] = {}
    for at, view in enumerate(views):
        if view is not None and view[0] and view[:2] not in found:
            first.setdefault(view[:2], at)
    return sorted(first.values())


def _make(entry: Entry) -> None:
    """Make a step, and keep it. What is wrong with it is raised when all ranks make theirs."""
    context = replace(entry.context, agree=tell_nobody)
    try:
        make_all(Entry(entry.name, entry.shown, entry.trace, entry.rows, context).program())
    except Exception as error:
        logger.debug("%s is not made for the other ranks: %s", entry.name, error)


def make_all(step: StepProgram, fits: Callable[[], None] = lambda: None) -> None:
    """Make all that a plain step runs, and keep it. `fits` raises if it is too large."""
    fits()
    step.first_gathers()
    step.forward()
    if step.parts().backward is not None:
        step.backward()
    step.keep()

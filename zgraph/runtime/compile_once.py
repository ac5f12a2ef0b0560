"""Lets one of the ranks that share a cache folder compile a program that is not cached yet; the others read it from
there.

This only saves time: a rank compiles what it does not find, and the votes before a program first runs compare the
ranks' programs, wherever they come from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from zgraph.build.build_context import tell_nobody
from zgraph.build.step_program import Entry, StepProgram
from zgraph.runtime.rank import Rank
from zgraph.torch_compat.kernel_files import kernels_together

logger = logging.getLogger(__name__)

View = tuple[str, str, bool]  # a rank's folder, the key of its step there, and whether the step is cached there


def compile_once(rank: Rank, entry: Entry) -> None:
    """Let one rank of each cache folder make the program of an entry that is not cached there. All ranks must call
    it.
    """
    agreement, keeper = rank.agreement, rank.keeper
    if not agreement.ranks or not agreement.any("whether programs are kept", keeper is not None):
        return
    mine: View | None = None
    if keeper is not None:
        step = keeper.step(entry.trace, entry.pattern, entry.name, entry.context)
        mine = (keeper.store.identity(), step.key, step.facts is not None) if step is not None else None
    views: list[View | None] = agreement.gather("what is kept of a program", mine)
    makers = compilers_of(views)
    if not makers:
        return
    if agreement.rank() in makers:
        _make(entry)
    agreement.gather("that a program was made", None)


def compilers_of(views: Sequence[View | None]) -> list[int]:
    """Return the ranks that compile: the first of those with the same folder and key, if none of them has found the
    step cached.
    """
    cached = {view[:2] for view in views if view is not None and view[2]}
    first: dict[tuple[str, str], int] = {}
    for at, view in enumerate(views):
        if view is not None and view[0] and view[:2] not in cached:
            first.setdefault(view[:2], at)
    return sorted(first.values())


def _make(entry: Entry) -> None:
    """Make a step and cache it. Errors are only logged: they are raised when all ranks make theirs."""
    context = replace(entry.context, agree=tell_nobody)
    try:
        compile_all(Entry(entry.name, entry.shown, entry.trace, entry.rows, context).program())
    except Exception as error:
        logger.debug("%s is not made for the other ranks: %s", entry.name, error)


def compile_all(step: StepProgram, fits: Callable[[], None] = lambda: None) -> None:
    """Make all programs that a plain step runs, and cache them. `fits` raises if the step is too large."""
    fits()
    step.first_gathers()
    with kernels_together():
        step.forward()
        if step.parts().backward is not None:
            step.backward()
        step.keep()

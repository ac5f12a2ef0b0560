"""Where this process is in its training: which step, program or vote. Written as it goes, at the cost of a few stores; read by who watches.

There is one place for a process: what it does in common with other ranks, it does in one thread at a time. Threads that work beside
it (late updates, checkpoints on their way) are `aside`. Ranks may be in several groups, and in each with others: what they do is counted for
each group, and what a rank does alone is not.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch import fx

from zgraph.errors import CollectiveError, ZgraphError
from zgraph.ranks.thread_stacks import Line


class Together(Protocol):
    """Ranks that run programs and vote together (an `Agreement`): their numbers, none where a rank is alone."""

    group: Any
    ranks: list[int]
    heart: Any

    def disagreement(self) -> ZgraphError | None:
        """After a collective has failed: what ranks disagree about, if one of them has shut it for that."""


class Running(Protocol):
    """A program that runs, and can tell which of its nodes a thread is at."""

    program: Any

    def running_node(self, stack: Sequence[Line]) -> fx.Node | None: ...


class Place:
    """`inside` is the program (an Executable) or the text of the vote that `thread` is in, None between them, and `others` with whom;
    `counts` says, by the ranks of a group, how many it has entered with them so far: equal on all of them where they are at the same one.
    `caller` is the thread that last called a model."""

    def __init__(self) -> None:
        self.step = 0
        self.micro_batch = 0
        self.inside: Running | str | None = None
        self.others: Together | None = None
        self.counts: dict[tuple[int, ...], int] = {}
        self.thread = 0
        self.caller = 0


Reporter = Callable[[Any], tuple[str, tuple[int, ...]] | None]

HERE = Place()
_mine = threading.local()  # of this thread: is it aside, and with whom it runs programs
_reporters: list[Reporter] = []


def enter(what: Any, others: Together | None = None) -> bool:
    """This thread enters a vote with `others`, or a program (see `runs_with`). Is that to be told (and `leave` to be called)?"""
    if _is_aside():
        return False
    others = others or getattr(_mine, "others", None)
    if others is not None and others.ranks:
        ranks = tuple(others.ranks)
        HERE.counts[ranks] = HERE.counts.get(ranks, 0) + 1
    HERE.thread = threading.get_ident()
    HERE.inside, HERE.others = what, others
    return True


def leave() -> None:
    HERE.inside = HERE.others = None


@contextlib.contextmanager
def runs_with(others: Together) -> Iterator[None]:
    """The programs that this thread runs inside are those of these ranks."""
    before = getattr(_mine, "others", None)
    _mine.others = others
    try:
        yield
    finally:
        _mine.others = before


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """What this thread runs inside is no part of what ranks do in common."""
    _mine.aside = True
    try:
        yield
    finally:
        _mine.aside = False


def _is_aside() -> bool:
    return getattr(_mine, "aside", False)


def report_by(reporter: Reporter, *, first: bool = False) -> None:
    """Let this be asked which ranks have not arrived at a node (None: a vote): (what is known of them, their numbers), None where nobody
    watches. The first that knows something is the last that is asked."""
    _reporters.insert(0 if first else len(_reporters), reporter)


def failed_collective(what: str, where: str, error: BaseException, node: Any = None) -> ZgraphError:
    """What to raise where a collective (that `node` of the program) has failed, with what is known of the other ranks: a `CollectiveError`,
    or in what ranks disagree, if that is why. To be called inside of the program or vote."""
    others = HERE.others
    if others is not None and not _is_aside() and (difference := others.disagreement()) is not None:
        return difference
    why = f"{type(error).__name__}: {error}"
    absent: tuple[int, ...] = ()
    for reporter in _reporters if not _is_aside() else ():
        found = reporter(node)
        if found is not None:
            why, absent = f"{why}\n{found[0]}", found[1]
            break
    made = CollectiveError(
        what, where=where, why=why, hint="a rank has died or stopped: look at the other ranks' output first"
    )
    made.absent = absent
    return made

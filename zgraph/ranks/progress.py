"""Records where this process is in its training: in which step, program or vote. Writing costs a few stores; the
heartbeat reads it.

A process has one place: what it does together with other ranks, it does in one thread at a time. Threads that work
beside it (late updates, checkpoints being written) are `aside`. A rank may be in several groups, with different ranks
in each: programs and votes are counted per group; what a rank does alone is not counted.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch import fx

from zgraph.errors import CollectiveError, ZgraphError
from zgraph.ranks.thread_stacks import StackFrame


class Together(Protocol):
    """Ranks that run programs and vote together (an `Agreement`). `ranks` are their numbers, [] if a rank is alone."""

    group: Any
    ranks: list[int]
    heart: Any

    def disagreement(self) -> ZgraphError | None:
        """Return, after a collective has failed, what ranks disagree about, if one of them shut its groups for that
        reason.
        """


class Running(Protocol):
    """A running program that can tell which of its nodes a thread is at."""

    program: Any

    def running_node(self, stack: Sequence[StackFrame]) -> fx.Node | None: ...


class RankProgress:
    """Where this process is.

    `inside` is the program (an Executable) or the text of the vote that `thread` is in, None between them; `others` are
    the ranks that it runs with. `counts` is, by the ranks of a group, how many programs and votes it has entered with
    them: equal on all ranks that are at the same one. `caller` is the thread that last called a model.
    """

    def __init__(self) -> None:
        self.step = 0
        self.micro_batch = 0
        self.inside: Running | str | None = None
        self.others: Together | None = None
        self.counts: dict[tuple[int, ...], int] = {}
        self.thread = 0
        self.caller = 0


Reporter = Callable[[Any], tuple[str, tuple[int, ...]] | None]

HERE = RankProgress()
_mine = threading.local()  # of this thread: whether it is aside, and the ranks that it runs programs with
_reporters: list[Reporter] = []


def enter(what: Any, others: Together | None = None) -> bool:
    """Enter a vote with `others`, or a program (see `runs_with`), in this thread. Return whether that is recorded, so
    that `leave` must be called.
    """
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
    """Run the programs inside together with these ranks."""
    before = getattr(_mine, "others", None)
    _mine.others = others
    try:
        yield
    finally:
        _mine.others = before


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Exclude what this thread runs inside from what ranks do together."""
    _mine.aside = True
    try:
        yield
    finally:
        _mine.aside = False


def _is_aside() -> bool:
    return getattr(_mine, "aside", False)


def report_by(reporter: Reporter, *, first: bool = False) -> None:
    """Register a function that is asked, after a collective has failed at a node (None: a vote), for (what is known of
    the other ranks, the ranks that have not arrived); it returns None if it knows nothing. The first answer counts.
    """
    _reporters.insert(0 if first else len(_reporters), reporter)


def failed_collective(what: str, where: str, error: BaseException, node: Any = None) -> ZgraphError:
    """Return the error to raise if a collective (at `node` of the program) has failed: a `CollectiveError` with what is
    known of the other ranks, or what ranks disagree about, if that is the reason. Call it inside of the program or
    vote.
    """
    others = HERE.others
    if others is not None and not _is_aside() and (difference := others.disagreement()) is not None:
        return difference
    why = f"{type(error).__name__}: {error}"
    absent: tuple[int, ...] = ()
    for reporter in _reporters if not _is_aside() else ():
        report = reporter(node)
        if report is not None:
            why, absent = f"{why}\n{report[0]}", report[1]
            break
    failure = CollectiveError(
        what, where=where, why=why, hint="a rank has died or stopped: look at the other ranks' output first"
    )
    failure.absent = absent
    return failure

"""Where this process is in its training: which step, program or vote. Written as it goes, at the cost of a few stores; read by who watches.

There is one place for a process: what it does in common with the other ranks, it does in one thread at a time. Threads that work beside
it (late updates, checkpoints on their way) are `aside`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from zgraph.errors import CollectiveError


class Place:
    """`inside` is the program (an Executable) or the text of the vote that `thread` is in, None between them; `count` how many it has
    entered so far, equal on all ranks where they are at the same one. `caller` is the thread that last called a model."""

    def __init__(self) -> None:
        self.step = 0
        self.micro_batch = 0
        self.inside: Any = None
        self.count = 0
        self.thread = 0
        self.caller = 0


Reporter = Callable[[Any], tuple[str, tuple[int, ...]] | None]

HERE = Place()
_aside = threading.local()
_reporters: list[Reporter] = []


def enter(what: Any) -> bool:
    """This thread enters a program or a vote. Is that to be told (and `leave` to be called)?"""
    if getattr(_aside, "on", False):
        return False
    HERE.thread = threading.get_ident()
    HERE.inside = what
    HERE.count += 1
    return True


def leave() -> None:
    HERE.inside = None


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """What this thread runs inside is no part of what ranks do in common."""
    _aside.on = True
    try:
        yield
    finally:
        _aside.on = False


def report_by(reporter: Reporter) -> None:
    """Let this be asked which ranks have not arrived at a node (None: a vote): (what is known of them, their numbers), None where nobody
    watches."""
    _reporters.append(reporter)


def failed_collective(what: str, where: str, error: BaseException, node: Any = None) -> CollectiveError:
    """What to raise where a collective (that `node` of the program) has failed, with what is known of the other ranks. To be called inside
    of the program or vote."""
    why = f"{type(error).__name__}: {error}"
    absent: tuple[int, ...] = ()
    for reporter in _reporters if not getattr(_aside, "on", False) else ():
        found = reporter(node)
        if found is not None:
            why, absent = f"{why}\n{found[0]}", found[1]
    made = CollectiveError(
        what, where=where, why=why, hint="a rank has died or stopped: look at the other ranks' output first"
    )
    made.absent = absent
    return made

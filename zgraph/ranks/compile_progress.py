"""Shows the progress of compiling a program: a bar on a terminal, elsewhere a line every ten seconds; both on stderr,
by rank 0 alone.

The remaining time is estimated: each stage has a share of the total (measured for a Llama), and the time of this
program's first stages tells how long a share takes. The compiling code reports where it is (`at`); a thread writes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

VARIABLE = "ZGRAPH_PROGRESS"  # "0": nothing is shown

CAPTURE, JOINT, PASSES, FORWARD, BACKWARD = "the model is captured", "the joint graph", "passes", "forward", "backward"
SHARES = {CAPTURE: 2.0, JOINT: 3.0, PASSES: 3.0, FORWARD: 0.2, BACKWARD: 0.4}
# If Inductor generates the code; kernels are compiled at the end.
CODE_SHARES = {FORWARD: 2.0, BACKWARD: 3.0}
SEARCHED = 20.0  # the passes take so many times longer if a memory budget's search runs them

EVERY = 10.0  # seconds between lines
BRIEF = 2.0  # seconds before the bar appears
REFRESH = 0.2  # seconds between updates of the bar


class Compiling:
    """The progress of compiling one program."""

    def __init__(self, name: str, shares: dict[str, float], clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.thread = threading.get_ident()
        self._shares = shares
        self._clock = clock
        self._stages = list(shares)
        self._at = 0
        self._begin = self._entered = clock()

    def enter(self, stage: str) -> None:
        """Enter a stage; a stage that has begun already may be entered again, without effect."""
        at = self._stages.index(stage)
        if at > self._at:
            self._at, self._entered = at, self._clock()

    @property
    def taken(self) -> float:
        """Seconds since compiling began."""
        return self._clock() - self._begin

    def left(self) -> float | None:
        """Return the estimated seconds left; None in the first stage."""
        before = sum(self._shares[s] for s in self._stages[: self._at])
        if not before:
            return None
        each = (self._entered - self._begin) / before
        here = self._shares[self._stages[self._at]] * each - (self._clock() - self._entered)
        return max(here, 0.0) + each * sum(self._shares[s] for s in self._stages[self._at + 1 :])

    def share(self) -> float:
        """Return the share that is done, from 0 to 1."""
        left = self.left()
        return self.taken / (self.taken + left) if left is not None and self.taken else 0.0

    def line(self) -> str:
        """Return a line that names the current stage."""
        return f"compiling {self.name}: {self._stages[self._at]} ({self._at + 1} of {len(self._stages)})"

    def times(self) -> str:
        """Return the time taken, and the estimated time left, in words."""
        left = self.left()
        ahead = f", about {_rounded(left)} left" if left is not None else ""
        return f"{_rounded(self.taken)}{ahead}"


def _rounded(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


_now: list[Compiling] = []  # the program whose progress is shown, if any


def at(stage: str) -> None:
    """Enter a stage of the program that this thread compiles."""
    for compiling in _now:
        if compiling.thread == threading.get_ident():
            compiling.enter(stage)


@contextlib.contextmanager
def shown(name: str, *, here: bool, inductor: bool, searched: bool) -> Iterator[None]:
    """Show the progress of compiling a program while the block runs, on the rank that shows it (`here`). `searched`:
    under a memory budget.
    """
    stream = sys.stderr
    if not here or _now or stream is None or os.environ.get(VARIABLE) == "0":
        yield
        return
    shares = SHARES | (CODE_SHARES if inductor else {})
    compiling = Compiling(name, shares | {PASSES: shares[PASSES] * (SEARCHED if searched else 1)})
    ended = threading.Event()
    writer = threading.Thread(target=_write, args=(compiling, ended, stream), name="zgraph-progress", daemon=True)
    _now.append(compiling)
    writer.start()
    try:
        yield
    finally:
        _now.clear()
        ended.set()
        writer.join()


def _write(compiling: Compiling, ended: threading.Event, stream: TextIO) -> None:
    with contextlib.suppress(OSError, ValueError):  # (the stream may have been closed meanwhile)
        if getattr(stream, "isatty", bool)():  # (not every object in the place of stderr has it)
            if not ended.wait(BRIEF):
                _bar(compiling, ended, stream)
            return
        while not ended.wait(EVERY):
            print(f"zgraph: {compiling.line()}, {compiling.times()}", file=stream, flush=True)


def _bar(compiling: Compiling, ended: threading.Event, stream: TextIO) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[times]}"))
    # (The user's process prints as it likes: no stream is redirected.)
    options = {"redirect_stdout": False, "redirect_stderr": False}
    with Progress(*columns, console=Console(file=stream), transient=True, auto_refresh=False, **options) as bar:  # type: ignore[arg-type]
        task = bar.add_task("", total=1.0, times="")
        while not ended.wait(REFRESH):
            bar.update(task, completed=compiling.share(), description=compiling.line(), times=compiling.times())
            bar.refresh()

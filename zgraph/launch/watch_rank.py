"""Runs a rank's command, passes its output on, and reports its last lines if it fails:
`python -m zgraph.launch.watch_rank [--module | --no_python] COMMAND …`.

torchrun ends all ranks of a machine when one fails, and those of other machines fail when they miss it; the launcher reads the output of all of
them in any order. So each rank has this watcher. It ends as the rank does (torchrun sees the same exit code or signal), and reports a rank that
failed (`zgraph.launch.rank_deaths`), unless that was asked to end before. torchrun gives it a session of its own and signals all of that: what the
watcher gets, the rank gets as well.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO

from zgraph.launch.local_rank import KINDS, line_of
from zgraph.launch.rank_deaths import Death

LAST_LINES = 40  # of a rank that are reported
TEARDOWN = 30.0  # seconds that Python may take from a traceback to its end: it frees what the rank had
SOON = 10.0  # seconds from a traceback within which ranks that miss this one have failed, so that it is asked to end
_DRAINED = (
    1.0  # seconds in which what an ended rank has printed is read; processes that it left behind may hold the pipe open
)
_TRACEBACK = "Traceback (most recent call last)"
_PR_SET_PDEATHSIG = 1  # (linux/prctl.h)


class Output:
    """What a rank prints: its last lines are remembered, and when they came."""

    def __init__(self) -> None:
        self.last: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self.unfinished: set[int] = set()  # the files that were written to last without an end of line
        self._printed_at = time.monotonic()
        self._traceback_at: float | None = None  # when the last traceback began

    def pass_on(self, source: IO[bytes], target: int) -> None:
        """Write what comes from one file to another as it comes, until the first ends. (If nobody reads the other any
        more, the rank's next write fails, as it would without a watcher.)"""
        line = b""
        with source, contextlib.suppress(OSError):
            while chunk := source.read(1 << 16):
                *lines, line = (line + chunk.replace(b"\r", b"\n")).split(b"\n")
                self._note(lines)
                _write(target, chunk)
                (self.unfinished.add if line else self.unfinished.discard)(target)
        self._note([line])

    def _note(self, lines: Sequence[bytes]) -> None:
        for text in filter(None, (line.decode(errors="replace").rstrip() for line in lines)):
            self._printed_at = time.monotonic()
            if _TRACEBACK in text:
                self._traceback_at = self._printed_at
            self.last.append(text)

    def failing_for(self, now: float) -> float:
        """Return for how many seconds a rank that failed has done so: since its last traceback, or else since its last line."""
        traceback = self._traceback_at
        return now - (traceback if traceback is not None and now - traceback < TEARDOWN else self._printed_at)

    def raised_before(self, asked: float) -> bool:
        """Return whether the rank had printed a traceback shortly before it was asked to end."""
        return self._traceback_at is not None and 0 <= asked - self._traceback_at < SOON


def _write(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]


def _end_with_the_parent() -> None:
    """Have the kernel kill this process when its parent, which may be killed alone, has ended."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run(line: Sequence[str]) -> int:
    """Run a rank's command and return its exit code, -N if signal N ended it; report a failure on stderr."""
    asked: list[float] = []  # when
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: asked.append(time.monotonic()))
    for number in (
        signal.SIGUSR1,
        signal.SIGUSR2,
    ):  # (as Slurm warns all processes of a job; it is the rank that answers)
        signal.signal(number, lambda *_: None)
    environ = {
        "PYTHONUNBUFFERED": "1",
        **os.environ,
    }  # (as torchrun's `python -u`: what a killed rank has printed is there)
    rank = subprocess.Popen(
        list(line),
        bufsize=0,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=_end_with_the_parent,
    )
    output, streams = Output(), ((rank.stdout, 1), (rank.stderr, 2))
    readers = [threading.Thread(target=output.pass_on, args=stream, daemon=True) for stream in streams]
    for reader in readers:
        reader.start()
    code = rank.wait()
    limit = time.monotonic() + _DRAINED
    for reader in readers:
        reader.join(timeout=max(limit - time.monotonic(), 0))
    if code and (not asked or output.raised_before(asked[0])):
        _report(output, code, bool(asked))
    return code


def _report(output: Output, code: int, asked: bool) -> None:
    rank, local_rank, attempt = (
        int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
    )
    failing_for = output.failing_for(time.monotonic())
    death = Death(rank, local_rank, socket.gethostname(), attempt, code, asked, failing_for, list(output.last))
    with contextlib.suppress(OSError):
        _write(2, b"\n" if output.unfinished else b"")
        for text in death.report():
            _write(2, text)


def main(words: Sequence[str]) -> None:
    """Run the command, and end as it does."""
    kind = words[0] if words[0] in KINDS else ""
    code = run(line_of(kind, words[1:] if kind else words))
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # (the rank has left its own)
        with contextlib.suppress(OSError):  # (SIGKILL has no handler to take away)
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])

"""A process of its own for cases that need no ranks: a crash or a case that hangs takes only that case with it."""

from __future__ import annotations

import multiprocessing as mp
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from .case import Case
from .harness import Verdict
from .runner import LIMITS, Outcome, run

CASES = 250
"""After so many cases the process is started anew, for what torch keeps of compiled code."""


class Worker:
    """Runs cases in a process that it starts, and starts again where it is lost."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Connection | None = None
        self._cases = 0

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process, self._cases = None, 0

    def run(self, case: Case) -> Outcome:
        """Run a case. Where the process dies, or does not answer, it is "unclear"."""
        if self._process is None or self._cases >= CASES:
            self.stop()
            context = mp.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        assert self._pipe is not None
        begin, limit = time.monotonic(), 4.0 * LIMITS[case.run]
        self._cases += 1
        try:
            self._pipe.send(case)
            if self._pipe.poll(limit):
                return self._pipe.recv()  # type: ignore[no-any-return]
            verdict = Verdict("unclear", "hangs", f"no answer after {limit:.0f} s")
        except (EOFError, OSError):
            self._process.join(10)
            verdict = Verdict("unclear", "crashes", f"the process ended with exit code {self._process.exitcode}")
        self.stop()
        return Outcome(case, verdict, time.monotonic() - begin)


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        case = pipe.recv()
        try:
            outcome = run(case)
        except Exception as error:
            verdict = Verdict("unclear", f"harness: {type(error).__name__}: {error}", traceback.format_exc())
            outcome = Outcome(case, verdict, 0.0)
        pipe.send(outcome)

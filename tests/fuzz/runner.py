"""Run one case in this process: its program is made a module for each side, and what the two gave is compared."""

from __future__ import annotations

import contextlib
import gc
import itertools
import linecache
import logging
import signal
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import harness
from .case import Case
from .harness import Verdict
from .source import render

LIMITS = {"eager": 60, "inductor": 240, "virtual": 120, "ranks": 120}
"""Seconds of processor time that a case may take, by kind of run (of real ranks, seconds)."""


@dataclass(frozen=True)
class Outcome:
    """What a case came to, and how long it took."""

    case: Case
    verdict: Verdict
    seconds: float

    @property
    def bad(self) -> bool:
        return self.verdict.word in ("wrong", "unclear")


class TooLong(BaseException):
    """A case that takes longer than its limit. (No `Exception`: what is run must not swallow it.)"""


def run(case: Case, limit: float | None = None) -> Outcome:
    """Run a case of any kind but "ranks", which `ranks` runs."""
    begin = time.monotonic()
    try:
        with quiet(), time_limit(limit or LIMITS[case.run]), programs(case) as load:
            verdict = harness.run_virtual(load) if case.run == "virtual" else harness.run_pair(load)
    except TooLong:
        verdict = Verdict("unclear", "takes too long", f"more than {limit or LIMITS[case.run]} s of processor time")
    tidy()
    return Outcome(case, verdict, time.monotonic() - begin)


_count = itertools.count()


@contextlib.contextmanager
def programs(case: Case) -> Iterator[Callable[[str], Any]]:
    """What makes modules of a case's program: each with globals of its own, gone when the case is."""
    text, made = render(case), []

    def load(name: str) -> types.ModuleType:
        name = f"fuzzed_{name}_{case.seed}_{next(_count)}"
        module = types.ModuleType(name)
        module.__file__ = f"<{name}>"
        linecache.cache[module.__file__] = (len(text), None, text.splitlines(keepends=True), module.__file__)
        sys.modules[name] = module
        made.append(module)
        exec(compile(text, module.__file__, "exec"), module.__dict__)
        return module

    try:
        yield load
    finally:
        for module in made:
            sys.modules.pop(module.__name__, None)
            linecache.cache.pop(module.__file__ or "", None)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings, and no log of what is expected to fail."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TooLong` in the main thread when so many seconds of processor time are over: a busy machine makes no case too long."""

    def over(*_: object) -> None:
        raise TooLong

    old = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)


_cases = itertools.count(1)


def tidy() -> None:
    """Let go of what cases leave behind, now and then: it takes longer than a case."""
    if next(_cases) % 25 == 0:
        torch._dynamo.reset()
        gc.collect()

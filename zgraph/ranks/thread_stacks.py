"""Reads the stack of another thread.

The stack is read in one call of C, during which the thread stands still: the interpreter's lock changes hands only
between Python's own instructions. No frame is held afterwards: dynamo frees frames' memory by itself, and a frame that
is read while its thread goes on may point into freed memory (Python 3.11: PyFrame_GetBack read it). faulthandler can't
be used: it walks all threads without their list's lock, and crashed on threads that C++ was about to begin (gloo begins
some with each collective).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain, repeat, starmap, takewhile
from operator import attrgetter, methodcaller, truth

DEPTH = 200  # lines of a stack that are read

_place_of = attrgetter("f_code", "f_lineno")


@dataclass(frozen=True)
class StackFrame:
    """A line of code that a thread is at."""

    file: str  # path of the source file
    number: int  # line number, from 1; 0 if unknown
    function: str  # name of the function


def stack_of(thread: int) -> list[StackFrame]:
    """Return the lines that a thread is at, the innermost first, at most `DEPTH`; [] if it is not in Python."""
    innermost = map(methodcaller("get", thread), starmap(sys._current_frames, [()]))
    outwards = accumulate(chain(innermost, repeat("f_back", DEPTH - 1)), getattr)
    places = map(_place_of, takewhile(truth, outwards))
    with _no_collection():
        frames = list(places)  # (the one call: all of the above is lazy)
    return [StackFrame(code.co_filename, number or 0, code.co_name) for code, number in frames]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Turn garbage collection off inside: finalisers run Python code."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()

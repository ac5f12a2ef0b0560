"""Where another thread is: the lines of its stack.

The stack is read in one call of C, so that the thread stands still meanwhile: the interpreter's lock changes hands only between Python's
own instructions. Nor is any of its frames held afterwards: dynamo gives frames' memory back by itself, and one that is looked at while
the thread goes on may point into it (Python 3.11: PyFrame_GetBack read what was gone). faulthandler is no way: it walks all threads without
their list's lock, and died of those that C++ was about to begin (gloo's threads do with each collective).
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
class Line:
    """A line that a function of a file is at."""

    file: str
    number: int
    function: str


def stack_of(thread: int) -> list[Line]:
    """The lines that the thread of this identifier is at, the innermost first, at most `DEPTH`; none where it is not in Python."""
    innermost = map(methodcaller("get", thread), starmap(sys._current_frames, [()]))
    outwards = accumulate(chain(innermost, repeat("f_back", DEPTH - 1)), getattr)
    places = map(_place_of, takewhile(truth, outwards))
    with _no_collection():
        found = list(places)  # (the one call: all of the above is lazy)
    return [Line(code.co_filename, number or 0, code.co_name) for code, number in found]


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected meanwhile: finalisers are Python."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()

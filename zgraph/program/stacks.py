"""Where another thread is: the lines of its stack.

Frame objects of a thread that goes on are not to be walked: dynamo gives frames' memory back by itself, and one that is looked at
meanwhile may point into it (Python 3.11: PyFrame_GetBack read what was gone). faulthandler writes a stack at once, and makes no such objects.
"""

from __future__ import annotations

import faulthandler
import re
import tempfile
from dataclasses import dataclass

_THREAD = re.compile(r"thread (0x[0-9a-f]+)", re.IGNORECASE)
_LINE = re.compile(r'  File "(?P<file>.*)", line (?P<number>\d+) in (?P<function>.*)')


@dataclass(frozen=True)
class Line:
    """A line that a function of a file is at."""

    file: str
    number: int
    function: str


def stack_of(thread: int) -> list[Line]:
    """The lines that the thread of this identifier is at, the innermost first, at most 100; none where it is not in Python, or one of
    more than 100 threads."""
    with tempfile.TemporaryFile("w+", errors="replace") as text:
        faulthandler.dump_traceback(text, all_threads=True)
        text.seek(0)
        found: list[Line] = []
        here = False
        for line in text:
            if (begins := _THREAD.search(line)) is not None and not line.startswith(" "):
                here = int(begins[1], 16) == thread
            elif here and (at := _LINE.match(line)) is not None:
                found.append(Line(at["file"], int(at["number"]), at["function"].rstrip()))
    return found

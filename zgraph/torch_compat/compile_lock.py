"""One thread at a time in dynamo, AOTAutograd and Inductor, with Python's collector held back."""

from __future__ import annotations

import gc
import threading

# The number of new objects between two runs of the collector. (Tracing makes many, and drops few in cycles: with
# Python's own 700, collecting takes a fifth of a capture's time.)
_RARELY = 20_000


class _OneAtATime:
    """A reentrant lock that makes Python's collector run rarely while it is held.

    A collector that is turned off stays off; one whose thresholds were changed inside keeps the new ones.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._usual = self._ours = gc.get_threshold()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._usual = gc.get_threshold()
            often, second, third = self._usual
            self._ours = (max(often, _RARELY) if often else 0, second, third)
            gc.set_threshold(*self._ours)

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0 and gc.get_threshold() == self._ours:
            gc.set_threshold(*self._usual)
        self._lock.release()


# Held while dynamo, AOTAutograd or Inductor works: their state is the process's, not a thread's.
ONE_AT_A_TIME = _OneAtATime()

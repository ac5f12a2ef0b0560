"""One thread at a time in dynamo, AOTAutograd and Inductor, with Python's collector held back."""

from __future__ import annotations

import contextlib
import gc
import threading

# Tracing and passes make many objects, and drop few in cycles. The collector runs after so many new ones (with Python's
# own 700, it takes a fifth of a capture's time), and looks through all old ones after so many runs of its middle
# generation: hardly ever. (With Python's own 10, that takes a fifth of the time for 48 layers; without it, 0.1 GB more.)
_RARELY = 20_000
_OLD_RARELY = 1000


class _RareCollections(contextlib.ContextDecorator):
    """Makes Python's collector run rarely while any thread is inside.

    A collector that is turned off stays off; one whose thresholds were changed inside keeps the new ones.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._usual = self._ours = gc.get_threshold()

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._usual = gc.get_threshold()
                often, second, third = self._usual
                self._ours = (max(often, _RARELY) if often else 0, second, max(third, _OLD_RARELY))
                gc.set_threshold(*self._ours)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and gc.get_threshold() == self._ours:
                gc.set_threshold(*self._usual)


class _OneAtATime:
    """A reentrant lock, with rare collections while it is held."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()
        RARE_COLLECTIONS.__enter__()

    def __exit__(self, *_: object) -> None:
        RARE_COLLECTIONS.__exit__()
        self._lock.release()


# Around all that is compiled for a call: between its parts, too, old objects would be searched.
RARE_COLLECTIONS = _RareCollections()

# Held while dynamo, AOTAutograd or Inductor works: their state is the process's, not a thread's.
ONE_AT_A_TIME = _OneAtATime()

"""How much memory is free at each operator of a step, for values that arrive earlier than they must.

What a step needs in any case is known before anything is scheduled: activations and the like, whose order is fixed, and
each gathered parameter from its first reader to its last. Where that is below the step's peak, gathers may arrive early
at no cost in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


class MemorySlack:
    """The bytes that are free at each operator of a step.

    `others` are the bytes live at each operator without gathered parameters; `needed` are the gathered parameters, each
    as (position of its first reader, of its last, bytes); `spare` bytes may be added to the peak.
    """

    def __init__(self, others: Sequence[int], needed: Iterable[tuple[int, int, int]], spare: int) -> None:
        self._load = np.asarray([*others, others[-1] if others else 0], dtype=np.int64)
        for first, last, size in needed:
            self._load[first : last + 1] += size
        self.limit = int(self._load.max()) + spare

    def reached(self, at: int, first: int, size: int) -> int:
        """Return the most bytes that are live from operator `at` to the one before `first`, with `size` more. `limit`
        is the most allowed.
        """
        return int(self._load[at:first].max(initial=0)) + size

    def hold(self, at: int, first: int, size: int) -> None:
        """Add `size` bytes from operator `at` to the one before `first`: a value that is needed at `first` arrives at
        `at`.
        """
        self._load[at:first] += size

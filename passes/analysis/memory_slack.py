"""How much memory a step has left at each of its operators, for what is there earlier than it must be.

What a step needs in any case is known before anything is scheduled: activations and the like, whose order is fixed, and
each gathered parameter from its first reader to its last. Where that is below the step's peak, gathers may arrive early
for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


class Room:
    """`others` are the bytes live at each operator but for gathered parameters; `needed` are these, each as (position of its
    first reader, of its last, bytes); `spare` bytes may be added to the peak."""

    def __init__(self, others: Sequence[int], needed: Iterable[tuple[int, int, int]], spare: int) -> None:
        self._load = np.asarray([*others, others[-1] if others else 0], dtype=np.int64)
        for first, last, size in needed:
            self._load[first : last + 1] += size
        self.limit = int(self._load.max()) + spare

    def reached(self, at: int, first: int, size: int) -> int:
        """The most bytes that are live from operator `at` to the one before `first`, with `size` more. `limit` is what may be."""
        return int(self._load[at:first].max(initial=0)) + size

    def hold(self, at: int, first: int, size: int) -> None:
        """`size` bytes that are needed at operator `first` are there from operator `at` on."""
        self._load[at:first] += size

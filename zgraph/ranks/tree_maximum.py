"""Finds the greatest of the numbers that ranks give, over gloo: up a tree of the ranks, and down again.

gloo's own reductions pass numbers around a ring, 2 (n - 1) messages one after another, each by way of a thread of
gloo's. Here a rank sends and receives by itself, and n ranks wait for about 2 log2(n) messages one after another: the
binomial tree of collective communication (Thakur, Rabenseifner and Gropp, "Optimization of collective communication
operations in MPICH", 2005).

What is received next is asked for as soon as the last has come: gloo sends at once to a rank that waits already, and
asks any other one first. So nothing but the numbers themselves is sent while ranks wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from zgraph.torch_compat import autograd_state

TAG = 1  # of its messages; nothing else in its group sends from rank to rank


def neighbours(rank: int, world: int) -> tuple[int | None, list[int]]:
    """Return a rank's parent in the tree (None for rank 0), and its children, those with the fewest below them first."""
    children = []
    stride = 1
    while stride < world and not rank & stride:
        if rank + stride < world:
            children.append(rank + stride)
        stride *= 2
    return (rank - stride if rank else None), children


class TreeMaximum:
    """The greatest of rows of `width` int64 numbers over the ranks of a gloo group, element by element. All ranks must
    call it in the same order.
    """

    def __init__(self, group: Any, width: int) -> None:
        self.group = group
        self.parent, self.children = neighbours(group.rank(), group.size())
        senders = [*self.children, *([self.parent] if self.parent is not None else [])]
        self._rows = {sender: torch.empty(width, dtype=torch.int64, device="cpu") for sender in senders}
        self._receives = self._receive()

    def __call__(self, row: Sequence[int], timeout: timedelta | None) -> list[int]:
        """Return the greatest numbers of all ranks; `timeout` limits each wait for another rank. Raises `RuntimeError`
        if one did not come, or the group was shut.
        """
        waits = (timeout,) if timeout is not None else ()
        greatest = torch.tensor(row, dtype=torch.int64, device="cpu")
        for child in self.children:
            self._receives[child].wait(*waits)
            greatest = torch.maximum(greatest, self._rows[child])
        sends = []
        if self.parent is not None:
            sends.append(self.group.send([greatest], self.parent, TAG))
            self._receives[self.parent].wait(*waits)
            greatest = self._rows[self.parent].clone()
        sends += [self.group.send([greatest], child, TAG) for child in reversed(self.children)]
        for send in sends:
            send.wait(*waits)
        self._receives = self._receive()
        return greatest.tolist()

    def _receive(self) -> dict[int, Any]:
        """Ask for the next row of each neighbour. (A profile may end before it comes.)"""
        with autograd_state.unrecorded():
            return {sender: self.group.recv([row], sender, TAG) for sender, row in self._rows.items()}

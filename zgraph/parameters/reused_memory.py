"""Memory for one large tensor after another: what nobody holds any more is used again.

New memory costs a CPU more than what is written to it: of a gather of 64 MB on two ranks over gloo, 23 of 42 ms of the
processor were page faults. (Huge pages, asked for, halved these, or took four times as long where memory was scattered.)
So memory is kept from one gather of whole weights to the next, and the system may have it back in between (MADV_FREE):
134 MB that had rested were filled in 21 ms of the processor, new ones in 62.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

from zgraph.torch_compat.tensor_storage import holders

LEAST = 1 << 20  # bytes from which on memory is kept: the allocator itself keeps smaller pieces
_MADV_FREE = 8


class RestingMemory:
    """Pieces of memory that are kept for later, whose pages the system takes when it needs them."""

    def __init__(self) -> None:
        self._pieces: list[torch.Tensor] = []

    def take(self, size: int) -> torch.Tensor | None:
        """Return a piece of `size` bytes, uninitialised, which rests no more; None if there is none."""
        at = next((at for at, piece in enumerate(self._pieces) if piece.numel() == size), None)
        return None if at is None else self._pieces.pop(at)

    def give(self, pieces: list[torch.Tensor]) -> None:
        """Keep pieces that nobody else holds, where the system can have their pages; forget them elsewhere."""
        self._pieces += [piece for piece in pieces if _give_up_pages(piece)]


class ReusedMemory:
    """Pieces of memory on a device, of which it keeps `max_bytes` for later. On CUDA torch's allocator does the same.

    New pieces are taken from those that rest in `resting`, which gets them back when they are not needed any more, and in `rest` the others.
    """

    def __init__(self, device: torch.device, max_bytes: int, resting: RestingMemory | None = None) -> None:
        self.device, self.max_bytes = device, max_bytes
        self._resting = resting or RestingMemory()
        self._pieces: list[torch.Tensor] = []
        self._lent: set[int] = set()  # the addresses of the pieces that rested before

    def take(self, size: int) -> torch.Tensor:
        """Return `size` bytes, uninitialised, as a tensor that has a storage of just this size."""
        if self.device.type != "cpu" or size < LEAST:
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        free = [p for p in self._pieces if holders(p) == 1]
        piece = next((p for p in free if p.numel() == size), None)
        if piece is None:
            self._drop(free, size)
            piece = self._resting.take(size)
            if piece is None:
                piece = torch.empty(size, dtype=torch.uint8)
            else:
                self._lent.add(piece.data_ptr())
            self._pieces.append(piece)
        return piece[:]

    def rest(self) -> None:
        """Let the pieces rest that nobody holds any more, and forget the others."""
        self._resting.give([p for p in self._pieces if holders(p) == 1])
        self._pieces.clear()
        self._lent.clear()

    def _drop(self, free: list[torch.Tensor], size: int) -> None:
        """Forget free pieces, the oldest first, until there is room for `size` bytes more."""
        total = sum(p.numel() for p in self._pieces)
        for piece in free:
            if total + size <= self.max_bytes:
                break
            total -= piece.numel()
            self._pieces = [p for p in self._pieces if p is not piece]
            if piece.data_ptr() in self._lent:
                self._resting.give([piece])


def _give_up_pages(piece: torch.Tensor) -> bool:
    """Tell the system that what is in the whole pages of a piece is not needed any more; return whether it could be told."""
    if sys.platform != "linux":
        return False
    page = mmap.PAGESIZE
    start = -(-piece.data_ptr() // page) * page
    length = (piece.data_ptr() + piece.numel()) // page * page - start
    return ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_FREE) == 0

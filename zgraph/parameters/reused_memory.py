"""Memory for one large tensor after another: what nobody holds any more is used again.

New memory costs a CPU more than what is written to it: of a gather of 64 MB on two ranks over gloo, 23 of 42 ms of the
processor were page faults. (Huge pages, asked for, halved these, or took four times as long where memory was scattered.)
"""

from __future__ import annotations

import torch

from zgraph.torch_compat.tensor_storage import holders

LEAST = 1 << 20  # bytes from which on memory is kept: the allocator itself keeps smaller pieces


class ReusedMemory:
    """Pieces of memory on a device, of which it keeps `max_bytes` for later. On CUDA torch's allocator does the same."""

    def __init__(self, device: torch.device, max_bytes: int) -> None:
        self.device, self.max_bytes = device, max_bytes
        self._pieces: list[torch.Tensor] = []

    def take(self, size: int) -> torch.Tensor:
        """Return `size` bytes, uninitialised, as a tensor that has a storage of just this size."""
        if self.device.type != "cpu" or size < LEAST:
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        free = [p for p in self._pieces if holders(p) == 1]
        piece = next((p for p in free if p.numel() == size), None)
        if piece is None:
            self._drop(free, size)
            piece = torch.empty(size, dtype=torch.uint8)
            self._pieces.append(piece)
        return piece[:]

    def _drop(self, free: list[torch.Tensor], size: int) -> None:
        """Forget free pieces, the oldest first, until there is room for `size` bytes more."""
        total = sum(p.numel() for p in self._pieces)
        for piece in free:
            if total + size <= self.max_bytes:
                break
            total -= piece.numel()
            self._pieces = [p for p in self._pieces if p is not piece]

"""Provides memory for reads and writes of a disk: aligned to its blocks, bounded, and reused."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zgraph.torch_compat import tensor_storage

BLOCK = 4096  # bytes; offsets and sizes of direct transfers are multiples of it
PIECE = 8 * 2**20  # bytes that one thread reads or writes at a time


def aligned(size: int) -> torch.Tensor:
    """Return `size` bytes of torch's own memory that begin at a block."""
    memory = torch.empty(size + BLOCK, dtype=torch.uint8, device="cpu")
    start = -memory.data_ptr() % BLOCK
    return memory[start : start + size]


class Landing(threading.local):
    """The memory that one thread reads into. Inside `reused` it is taken again once its values are freed: pages that
    are new to the process take as long as the disk does.
    """

    _kept: list[tuple[torch.Tensor, int]] | None = None  # each with its number of holders when it is idle

    def take(self, size: int) -> torch.Tensor:
        """Return `size` aligned bytes, uninitialised."""
        if self._kept is None:
            return aligned(size)
        idle = [memory for memory, own in self._kept if tensor_storage.holders(memory) == own]
        buffer = next((m for m in idle if size <= m.numel() <= 2 * size), None)
        if buffer is None:
            gone = {id(m) for m in idle}
            buffer = aligned(size)
            self._kept = [(m, n) for m, n in self._kept if id(m) not in gone] + [
                (buffer, tensor_storage.holders(buffer))
            ]
        return buffer[:size]

    @contextmanager
    def reused(self) -> Iterator[None]:
        """Let this thread read into memory of values that it read inside and that were freed since. Not reentrant."""
        self._kept = []
        try:
            yield
        finally:
            self._kept = None


class Buffer:
    def __init__(self, size: int) -> None:
        pages = mmap.mmap(-1, size)
        self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(pages))
        self.view = memoryview(pages)


class Staging:
    """Aligned buffers for values that are not aligned. A thread has one at a time and waits only for the disk while it
    has it, so each buffer is given back.
    """

    def __init__(self, limit: int, threads: int) -> None:
        if limit < BLOCK or threads < 1:
            raise ValueError(f"staging_bytes is {limit}, threads is {threads}: at least {BLOCK} and 1 are needed")
        self.size = min(max(limit // threads // BLOCK * BLOCK, BLOCK), PIECE)
        self.left = min(limit // self.size, threads)  # buffers that may still be allocated
        self.peak = 0
        self._spare: list[Buffer] = []
        self._changed = threading.Condition()

    @contextmanager
    def buffer(self) -> Iterator[Buffer]:
        with self._changed:
            self._changed.wait_for(lambda: self._spare or self.left)
            if self._spare:
                taken = self._spare.pop()
            else:
                taken = Buffer(self.size)
                self.left -= 1
                self.peak += self.size
        try:
            yield taken
        finally:
            with self._changed:
                self._spare.append(taken)
                self._changed.notify()

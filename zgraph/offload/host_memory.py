"""Provides the host's memory as a tier: pinned for a CUDA device, and outside of what torch's allocator counts.

On CUDA copies run on a stream for each direction, on a CPU on a thread of their own.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

Wait = Callable[[], None]


class HostMemory:
    """Tensors in the host's memory, for a model on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._threads = None if device.type == "cuda" else ThreadPoolExecutor(1, "zgraph-host")
        if self._threads is not None:
            weakref.finalize(self, self._threads.shutdown, wait=False)
        self._streams = (
            {way: torch.cuda.Stream(device) for way in ("in", "out")} if device.type == "cuda" else {}  # type: ignore[no-untyped-call]
        )

    def tensor(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a dense tensor in the host's memory, uninitialised. Raises `MemoryError` if there is no room."""
        if self.device.type == "cuda":
            return torch.empty_strided(shape, stride, dtype=dtype, pin_memory=True)
        size = math.prod(shape)
        if not size:
            return torch.empty_strided(shape, stride, dtype=dtype)
        try:
            mapping = mmap.mmap(-1, size * dtype.itemsize)
        except OSError as error:
            raise MemoryError(f"the host has no room for {size * dtype.itemsize} bytes more") from error
        return torch.frombuffer(mapping, dtype=dtype).as_strided(tuple(shape), tuple(stride))

    def read(self, home: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Wait]:
        """Start to copy `home`; return (a new tensor on `device`, which may be the host, a function that waits for its
        values).
        """
        pinned = device.type == "cpu" and self.device.type == "cuda"
        value = torch.empty_strided(home.shape, home.stride(), dtype=home.dtype, device=device, pin_memory=pinned)
        return value, self._copy(value, home, "out" if pinned else "in", to_be_read=pinned)

    def write(self, home: torch.Tensor, value: torch.Tensor) -> Wait:
        """Start to write `value` to `home`; `value` must not change until the wait."""
        return self._copy(home, value, "out")

    def settle(self) -> None:
        """Wait until the host can read what was written. (On CUDA the wait of a write holds up the device only.)"""
        if self._streams:
            self._streams["out"].synchronize()

    def _copy(self, to: torch.Tensor, of: torch.Tensor, way: str, *, to_be_read: bool = False) -> Wait:
        """Start a copy; return the function that waits for it: on CUDA it lets the device wait, or the host if
        `to_be_read` there.
        """
        if self._threads is not None:
            done = self._threads.submit(_copied, to, of)
            return lambda: (done.result(), None)[1]
        stream, here = self._streams[way], torch.cuda.current_stream(self.device)
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            to.detach().copy_(of.detach(), non_blocking=True)
            over = torch.cuda.Event()  # type: ignore[no-untyped-call]
            over.record(stream)
        for tensor in (to, of):
            if tensor.is_cuda:
                tensor.record_stream(stream)
        if to_be_read:
            return over.synchronize
        return lambda: torch.cuda.current_stream(self.device).wait_event(over)


@torch.inference_mode()
def _copied(to: torch.Tensor, of: torch.Tensor) -> None:
    """Copy in inference mode: values may be made in that mode, which each thread has for itself."""
    to.copy_(of)

"""The device that this process computes on, with DeepSpeed's interface."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
from typing import Any

import torch

from zgraph.deepspeed.utils.memory import most_resident_bytes, resident_bytes
from zgraph.errors import UnsupportedError


class Accelerator:
    """The GPU, or the CPU if there is no GPU."""

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available()

    def device_name(self, device_index: int | None = None) -> str:
        if not self._cuda:
            return "cpu"
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def current_device(self) -> int:
        return torch.cuda.current_device() if self._cuda else int(os.environ.get("LOCAL_RANK", "0"))

    def current_device_name(self) -> str:
        return self.device_name(torch.cuda.current_device() if self._cuda else None)

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def set_device(self, device_index: int) -> None:
        if self._cuda:
            torch.cuda.set_device(device_index)

    def device_count(self) -> int:
        """Count the GPUs of this node; on CPUs, the ranks that the launcher started on this node, or 1 if it does
        not say."""
        if self._cuda:
            return torch.cuda.device_count()
        return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)

    def is_available(self) -> bool:
        return True

    def communication_backend_name(self) -> str:
        return "nccl" if self._cuda else "gloo"

    def synchronize(self, device_index: int | None = None) -> None:
        if self._cuda:
            torch.cuda.synchronize(device_index)

    def empty_cache(self) -> None:
        if self._cuda:
            torch.cuda.empty_cache()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def random(self) -> Any:
        """Return the module `torch.random`."""
        return torch.random

    def initial_seed(self) -> int:
        return torch.cuda.initial_seed() if self._cuda else torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.cuda.get_rng_state(self._index(device_index)) if self._cuda else torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        if self._cuda:
            torch.cuda.set_rng_state(new_state, self._index(device_index))
        else:
            torch.set_rng_state(new_state)

    def is_synchronized_device(self) -> bool:
        """Return whether a call returns only when its work is done: True on a CPU, False on a GPU."""
        return not self._cuda

    use_host_timers = resolves_data_dependency = is_synchronized_device

    @property
    def Stream(self) -> Any:
        return torch.cuda.Stream if self._cuda else None

    @property
    def Event(self) -> Any:
        return torch.cuda.Event if self._cuda else None

    def stream(self, stream: Any) -> Any:
        """Return a context that puts kernels on a stream; it does nothing on a CPU."""
        return torch.cuda.stream(stream) if self._cuda else contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> Any:
        return torch.cuda.current_stream(device_index) if self._cuda else None

    def default_stream(self, device_index: int | None = None) -> Any:
        return torch.cuda.default_stream(device_index) if self._cuda else None

    def pin_memory(
        self, tensor: torch.Tensor, align_bytes: int = 1, make_copy: bool = True, match_shape: bool = True
    ) -> torch.Tensor:
        """Return a copy of the tensor in page-locked memory, of its own shape; without a GPU, return the tensor itself.

        Raises `UnsupportedError` for an alignment beyond a page's, and for memory that is to be no copy.
        """
        if align_bytes > mmap.PAGESIZE or not (make_copy and match_shape):
            raise UnsupportedError(
                f"pin_memory(align_bytes={align_bytes}, make_copy={make_copy}, match_shape={match_shape})",
                why="torch pins whole pages, and copies the tensor into them",
                hint=f"at most {mmap.PAGESIZE} bytes, and a copy of the same shape",
            )
        return tensor.pin_memory() if self._cuda else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device_name()

    def range_push(self, msg: str) -> None:
        if self._cuda:
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self) -> None:
        if self._cuda:
            torch.cuda.nvtx.range_pop()

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def is_triton_supported(self) -> bool:
        return self._cuda

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if self._cuda else True

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the allocated bytes; on a CPU, the bytes of the process in RAM."""
        return torch.cuda.memory_allocated(device_index) if self._cuda else resident_bytes()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the peak of the allocated bytes; on a CPU, the peak of the process in RAM."""
        return torch.cuda.max_memory_allocated(device_index) if self._cuda else most_resident_bytes()

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Return the bytes that torch's allocator has reserved; on a CPU, the bytes of the process in RAM."""
        return torch.cuda.memory_reserved(device_index) if self._cuda else resident_bytes()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Return the peak of the reserved bytes; on a CPU, the peak of the process in RAM."""
        return torch.cuda.max_memory_reserved(device_index) if self._cuda else most_resident_bytes()

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of the device's memory, or of the host's without a GPU."""
        if self._cuda:
            return torch.cuda.get_device_properties(device_index or 0).total_memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the free bytes of the device, or of the host without a GPU."""
        if self._cuda:
            return torch.cuda.mem_get_info(device_index)[0]
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")

    def _index(self, given: int | None) -> int:
        return torch.cuda.current_device() if given is None else given


@functools.cache
def get_accelerator() -> Accelerator:
    """Return this process's device."""
    return Accelerator()


def is_current_accelerator_supported() -> bool:
    return True

"""Measures the memory that steps take, for comparison with the forecast, and the memory that is free.

On CUDA torch's allocator reports it; on CPU it is counted, once `zgraph.runtime.allocations.count()` has been called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from zgraph.passes.analysis.live_memory import memory_of
from zgraph.program.program import Program
from zgraph.ranks.host import host_free
from zgraph.runtime import allocations
from zgraph.units import shown_bytes

COMPILING = 2  # the first steps, whose peaks and times are left out
MEASURED = 8  # steps after them; later steps leave the allocator's maximum to the user


@dataclass
class StepMemory:
    """The peaks of the first steps of one compiled module. Each of these steps resets the allocator's own maximum."""

    device: torch.device  # where the module runs
    peaks: list[int] = field(default_factory=list)  # peak of each step, in bytes

    def begin(self) -> None:
        """Reset the peak at the beginning of a step."""
        if len(self.peaks) == COMPILING + MEASURED:
            return
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif allocations.counting():
            allocations.reset_peak()

    def end(self) -> None:
        """Record the peak at the end of a step."""
        if len(self.peaks) == COMPILING + MEASURED:
            return
        if self.device.type == "cuda":
            self.peaks.append(torch.cuda.max_memory_allocated(self.device))
        elif allocations.counting():
            self.peaks.append(allocations.peak())

    @property
    def measured(self) -> int | None:
        """The highest peak after the first two steps; None before there is one, and if nothing is counted."""
        return max(self.peaks[COMPILING:], default=None)


def table(programs: Sequence[Program], fused: bool, held: int, measured: int | None) -> list[str]:
    """Return lines that compare the forecast of the program with the highest peak with what was measured. `fused`: see
    `memory_of`; `held` are bytes in use outside of programs all the time.
    """
    positions = [(at, program) for program in programs for at in memory_of(program, fused)]
    if not positions:
        return []
    worst, of = max(positions, key=lambda position: sum(position[0].values()))
    total = sum(worst.values()) + held
    sizes = ", ".join(f"{name}={size}" for name, size in of.sizes.largest.items())
    line = f"memory: forecast peak {shown_bytes(total)}{f' at {sizes}' if sizes else ''}"
    if measured is not None:
        line += f", measured {shown_bytes(measured)} ({(total - measured) / measured:+.1%})"
    parts = [*worst.items(), ("optimizer states and waiting gradients", held)]
    return [line, *(f"  {name:40} {shown_bytes(size)}" for name, size in sorted(parts, key=lambda i: -i[1]) if size)]


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device, in bytes."""

    held: int | None  # in use by this process's tensors; None if they are not counted
    free: int  # what this process could still allocate


def room_of(device: torch.device) -> DeviceMemory:
    """Return the bytes of a device that are in use, and that are free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        return DeviceMemory(allocated, free + reserved - allocated)
    return DeviceMemory(allocations.live() if allocations.counting() else None, host_free())

"""The memory that there is, and that steps really take, to stand beside its forecast.

On CUDA it is what torch's allocator says of itself; on CPU it is counted, once `zgraph.runtime.allocations.count()` has been called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from zgraph.passes.analysis.memory import memory_of
from zgraph.program.program import Program
from zgraph.ranks.host import host_free
from zgraph.runtime import allocations
from zgraph.units import shown_bytes

COMPILING = 2  # the first steps, whose peaks are left out
MEASURED = 8  # steps after them; then the allocator's own maximum is the user's again


@dataclass
class StepMemory:
    """The peaks of the first steps of one compiled module, in bytes of the allocator. Each step sets the allocator's own
    maximum back."""

    device: torch.device
    peaks: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """A step begins."""
        if len(self.peaks) == COMPILING + MEASURED:
            return
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif allocations.counting():
            allocations.reset_peak()

    def end(self) -> None:
        """It is over."""
        if len(self.peaks) == COMPILING + MEASURED:
            return
        if self.device.type == "cuda":
            self.peaks.append(torch.cuda.max_memory_allocated(self.device))
        elif allocations.counting():
            self.peaks.append(allocations.peak())

    @property
    def measured(self) -> int | None:
        """The most of the steps after the first two; None before there are any, and where nothing is counted."""
        return max(self.peaks[COMPILING:], default=None)


def table(programs: Sequence[Program], fused: bool, held: int, measured: int | None) -> list[str]:
    """Lines that set the forecast of the program with the highest peak beside what was measured. `fused`: see `memory_of`; `held` are bytes that
    live outside of programs all the time."""
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
class Room:
    """Bytes of a device: `held` by this process's tensors, None where nobody counts; `free` ones that it could still get."""

    held: int | None
    free: int


def room_of(device: torch.device) -> Room:
    """What is held of a device, and what is left."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        return Room(held, free + reserved - held)
    return Room(allocations.live() if allocations.counting() else None, host_free())

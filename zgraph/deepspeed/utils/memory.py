"""The memory of a process, by DeepSpeed's calls."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import torch

from zgraph.deepspeed import comm
from zgraph.deepspeed.utils.logging import logger
from zgraph.units import shown_bytes


def resident_bytes() -> int:
    """Return the bytes of this process in RAM; 0 if the system does not say."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("VmRSS:")), "VmRSS: 0 kB")
    return int(line.split()[1]) * 1024


def see_memory_usage(message: str, force: bool = False, ranks: tuple[int, ...] = (0,)) -> None:
    """Log the memory of the device and the host on these ranks; without `force` do nothing, as DeepSpeed does."""
    if not force or comm.get_rank() not in ranks:
        return
    gc.collect()
    host = f"host {shown_bytes(resident_bytes())}, at most {shown_bytes(most_resident_bytes())}"
    if torch.cuda.is_available():
        now, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        host = f"device {shown_bytes(now)}, at most {shown_bytes(most)}; {host}"
    logger.info("%s: %s", message, host)


def memory_status(msg: str = "", print_rank: int = -1, reset_max: bool = False) -> dict[str, int]:
    """Return the present and the peak bytes of the device ("allocated") and the host ("resident"); log them on
    `print_rank` (-1: all)."""
    cuda = torch.cuda.is_available()
    sizes = {
        "allocated": torch.cuda.memory_allocated() if cuda else 0,
        "max_allocated": torch.cuda.max_memory_allocated() if cuda else 0,
        "resident": resident_bytes(),
        "max_resident": most_resident_bytes(),
    }
    if print_rank in (-1, comm.get_rank()):
        logger.info("%s %s", msg, ", ".join(f"{name} {shown_bytes(size)}" for name, size in sizes.items()))
    if reset_max and cuda:
        torch.cuda.reset_peak_memory_stats()
    return sizes


def most_resident_bytes() -> int:
    """Return the peak bytes of this process in RAM."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

"""Reads what the operating system says of this machine. Loads no torch."""

from __future__ import annotations

import os
import resource
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder that caches results for later processes: `ZGRAPH_CACHE`, else "zgraph" in the user's cache. It
    may not exist.
    """
    named = os.environ.get("ZGRAPH_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zgraph"


def host_free() -> int:
    """Return the bytes of the host's memory that this process can still allocate: the least of what the system, the
    limit on its address space and its control group leave.
    """
    free_bytes = []
    for line in text_of("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free_bytes.append(int(line.split()[1]) * 1024)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = text_of("/proc/self/statm").split()
    if limit != resource.RLIM_INFINITY and pages:
        free_bytes.append(limit - int(pages[0]) * resource.getpagesize())
    group = text_of("/sys/fs/cgroup/memory.max").strip(), text_of("/sys/fs/cgroup/memory.current").strip()
    if all(text.isdigit() for text in group):
        free_bytes.append(int(group[0]) - int(group[1]))
    return max(0, min(free_bytes, default=0))


def text_of(path: str) -> str:
    """Return the text of a system file; "" if there is none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

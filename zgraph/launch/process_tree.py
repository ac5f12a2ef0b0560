"""The processes that a command has started, also those in sessions of their own, and after the command itself has ended.

Process groups do not tell: torchrun gives each rank a session of its own. So a command runs with a variable of its own (`mark`), which what it starts
inherits: a process belongs to the command if its environment has the variable, or if its parent belongs. Where there is no /proc, none is found.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

_PROC = Path("/proc")
_ENDED = "ZX"  # states of a process that has ended and that its parent has not asked about yet


def mark() -> str:
    """Return the name of a variable that marks one command and what it starts."""
    return f"_ZGRAPH_LAUNCH_{uuid.uuid4().hex}"


def tree(name: str, leader: int | None = None) -> set[int]:
    """Return the running processes whose environment has the variable `name`, those of the process group `leader`, and their
    descendants."""
    entry, pids, parents = f"\0{name}=".encode(), set[int](), dict[int, int]()
    for folder in _PROC.glob("[0-9]*"):
        pid = int(folder.name)
        with contextlib.suppress(OSError):  # (it has ended, or is another user's)
            state, parent, group = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:3]
            if state in _ENDED:
                continue
            parents[pid] = int(parent)
            if int(group) == leader or entry in b"\0" + (folder / "environ").read_bytes():
                pids.add(pid)
    while more := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= more
    return pids


def send(pids: set[int], number: int) -> None:
    """Send a signal to processes, those that have ended left out."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

"""The processes that a command has started, also those in sessions of their own, and after the command itself has ended.

Process groups do not tell: torchrun gives each rank a session of its own. So a command runs with a variable of its own (`mark`), which what it starts
inherits: a process belongs to the command if its environment has the variable, or if its parent belongs. Where there is no /proc, none is found.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable
from pathlib import Path

_PROC = Path("/proc")
_ENDED = "ZX"  # states of a process that has ended and that its parent has not asked about yet


def mark() -> str:
    """Return the name of a variable that marks one command and what it starts."""
    return f"_ZGRAPH_LAUNCH_{uuid.uuid4().hex}"


def tree(name: str, leader: int | None = None) -> list[int]:
    """Return the running processes whose environment has the variable `name`, those of the process group `leader`, and their
    descendants, each behind its parent."""
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
    ordered: list[int] = []
    while pids:  # (a number given anew while this reads may make a circle of parents: then in any order)
        ordered += (eldest := {pid for pid in pids if parents[pid] not in pids} or pids)
        pids = pids - eldest
    return ordered


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to processes, those that have ended left out. (Parents first, so who watches a child knows when it ends that it was asked to.)"""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

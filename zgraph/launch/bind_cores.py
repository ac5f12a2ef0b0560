"""Runs a rank's command on cores of its own: `python -m zgraph.launch.bind_cores [--module | --no_python] CORES COMMAND …`.

`CORES` is a list such as "0-7,16-23", or "all": those that this process may run on. They are divided evenly between the ranks of the machine
(LOCAL_RANK, LOCAL_WORLD_SIZE, which torchrun sets), in their order; OMP_NUM_THREADS is set to their number, unless it is set already.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Sequence

from zgraph.errors import MeshError
from zgraph.launch.local_rank import KINDS, line_of

ALL = "all"
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def cores_of(text: str, there: Collection[int]) -> list[int]:
    """Return the cores of a list ("0-3,8"). Raises `MeshError` for an invalid list, a repeated core, and a core that
    is not in `there`."""
    if text == ALL:
        return sorted(there)
    cores: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise MeshError(f"{text!r} is no list of cores", where="--bind_core_list", hint='"0-7,16-23"')
        cores += range(int(match[1]), int(match[2] or match[1]) + 1)
    if len(set(cores)) < len(cores):
        raise MeshError(f"{text!r} names a core twice", where="--bind_core_list")
    if lost := sorted(set(cores) - set(there)):
        raise MeshError(f"there is no core {lost[0]}", where="--bind_core_list", why=f"there are {sorted(there)}")
    return cores


def share_of(cores: Sequence[int], rank: int, ranks: int) -> list[int]:
    """Return the cores of one rank. Raises `MeshError` if there are fewer cores than ranks."""
    each = len(cores) // ranks
    if not each:
        raise MeshError(
            f"{len(cores)} cores are too few for {ranks} ranks: each needs one of its own",
            where="--bind_cores_to_rank",
            hint="fewer ranks",
        )
    return list(cores[rank * each : (rank + 1) * each])


def main(words: Sequence[str]) -> None:
    """Bind this process to the rank's cores, and replace it by the command."""
    kind = words[0] if words[0] in KINDS else ""
    cores, *command = words[1:] if kind else words
    rank, ranks = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    mine = share_of(cores_of(cores, os.sched_getaffinity(0)), rank, ranks)
    os.sched_setaffinity(0, mine)
    os.environ.setdefault("OMP_NUM_THREADS", str(len(mine)))
    line = line_of(kind, command)
    os.execvp(line[0], line)


if __name__ == "__main__":
    main(sys.argv[1:])

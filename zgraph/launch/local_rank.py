"""Runs a rank's command with its rank on the machine as an argument, as DeepSpeed's launcher does:
`python -m zgraph.launch.local_rank [--module | --no_python] COMMAND …` runs `COMMAND --local_rank=N …`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

KINDS = ("--module", "--no_python")


def line_of(kind: str, command: Sequence[str]) -> list[str]:
    """Return the line that runs a command: a script, with `kind` "--module" a module of Python's, with "--no_python" a program."""
    return list(command) if kind == "--no_python" else [sys.executable, *(["-m"] if kind else []), *command]


def main(words: Sequence[str]) -> None:
    """Replace this process by the command, with LOCAL_RANK, which torchrun sets, as its first argument."""
    kind = words[0] if words[0] in KINDS else ""
    name, *arguments = words[1:] if kind else words
    line = line_of(kind, [name, f"--local_rank={os.environ['LOCAL_RANK']}", *arguments])
    os.execvp(line[0], line)


if __name__ == "__main__":
    main(sys.argv[1:])

"""A folder from which a pass that failed can be run again, on another machine or another day: `zgraph repro FOLDER`.

pipeline.json    the passes from the one that failed on, what it said, and what they were made from (see `zgraph.build.recipe`)
program.json     the program before it, as `zgraph.program.serialize` writes it
program.txt      the same for people
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zgraph.errors import VerifyError
from zgraph.program.printer import render
from zgraph.program.program import Program
from zgraph.program.serialize import to_json

FORMAT = 1
PIPELINE, PROGRAM = "pipeline.json", "program.json"
VARIABLE = "ZGRAPH_REPRO_DIR"


def write(program: Program, passes: Sequence[str], error: Exception, recipe: Mapping[str, Any] | None) -> Path:
    """Write a reproducer into a new folder, and return its path.

    The folder is made in the one that ZGRAPH_REPRO_DIR names, else in the system's folder for temporary files. `passes`
    begin with the one that raised `error` for `program`.
    """
    folder = Path(tempfile.mkdtemp(prefix="zgraph-repro-", dir=os.environ.get(VARIABLE)))
    data = to_json(program)
    (folder / PROGRAM).write_text(json.dumps(data), encoding="utf-8")
    (folder / "program.txt").write_text(render(program), encoding="utf-8")
    rest = {
        "format": FORMAT,
        "zgraph": data["zgraph"],
        "torch": data["torch"],
        "passes": list(passes),
        "error": told(error),
        "node": node_of(error),
        "recipe": recipe,
    }
    (folder / PIPELINE).write_text(json.dumps(rest, indent=2), encoding="utf-8")
    return folder


def told(error: Exception) -> str:
    """Return an error with its type, as text that can be compared with the error of another run."""
    return f"{type(error).__name__}: {error}"


def node_of(error: Exception) -> str | None:
    """Return the name of the node that an error is about, None if it names none."""
    return error.node if isinstance(error, VerifyError) else None

"""A program whose graph is made when somebody looks at it: its ports are enough to run what was compiled of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from zgraph.program.program import Program
from zgraph.program.serialize import frame_from_json, from_json, to_json

_LATE = ("module", "fake_mode")


class LateProgram(Program):
    """A `Program` that `make` gives the graph of, the first time that it is asked for. All else is known."""

    def __init__(
        self,
        frame: Mapping[str, Any],
        make: Callable[[], Program],
        text: str | None,
        digest: str,
        said: Mapping[str, Any] | None = None,
    ) -> None:
        self.__dict__.update(frame)
        self._make = make
        self._text = text  # its JSON form; None where nobody needs it
        self.kept_digest = digest
        self.said = said or {}  # what was read of its graph when that was there

    def __getattr__(self, name: str) -> Any:
        if name not in _LATE:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        made = self._make()
        for late in _LATE:
            self.__dict__[late] = getattr(made, late)
        return self.__dict__[name]

    @property
    def is_made(self) -> bool:
        """Whether somebody has looked at the graph, and may have changed it."""
        return "module" in self.__dict__


def is_unseen(program: Program) -> bool:
    """Whether a program's graph is yet to be made: it is as it was kept."""
    return isinstance(program, LateProgram) and not program.is_made


def text_of(program: Program) -> str:
    """A program's JSON form, as text. Raises `UnsupportedError` for what has none."""
    if isinstance(program, LateProgram) and is_unseen(program) and program._text is not None:
        return program._text
    return json.dumps(to_json(program), separators=(",", ":"))


def late_from_text(text: str, digest: str, said: Mapping[str, Any]) -> LateProgram:
    """The program of such a text, read as far as it has to be. `digest` is what it had when it was written, `said` what was read of its graph."""
    data = json.loads(text)
    return LateProgram(frame_from_json(data), lambda: from_json(data), text, digest, said)

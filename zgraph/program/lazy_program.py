"""A program whose graph is built when it is first accessed: its ports are enough to run what was compiled of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from zgraph.program.program import Program
from zgraph.program.serialize import frame_from_json, from_json, to_json

_LATE = ("module", "fake_mode")


class LazyProgram(Program):
    """A `Program` whose graph is built by `make` the first time that it is accessed; all other fields are known."""

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
        self._text = text  # its JSON form; without it `text_of` serializes the graph
        self.kept_digest = digest
        self.said = said or {}  # what was read of its graph before it was stored

    def __getattr__(self, name: str) -> Any:
        if name not in _LATE:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        program = self._make()
        for late in _LATE:
            self.__dict__[late] = getattr(program, late)
        return self.__dict__[name]

    @property
    def is_made(self) -> bool:
        """Whether somebody has looked at the graph, and may have changed it."""
        return "module" in self.__dict__


def is_unmade(program: Program) -> bool:
    """Return whether a program's graph has not been built yet: the program is as it was stored."""
    return isinstance(program, LazyProgram) and not program.is_made


def text_of(program: Program) -> str:
    """Return a program's JSON form, as text. Raises `UnsupportedError` for a program that has none."""
    if isinstance(program, LazyProgram) and is_unmade(program) and program._text is not None:
        return program._text
    return json.dumps(to_json(program), separators=(",", ":"))


def lazy_from_text(text: str, digest: str, said: Mapping[str, Any]) -> LazyProgram:
    """Return the program that `text_of` wrote, with its graph read only when accessed.

    `digest` is its digest when it was written, `said` what was read of its graph then.
    """
    data = json.loads(text)
    return LazyProgram(frame_from_json(data), lambda: from_json(data), text, digest, said)

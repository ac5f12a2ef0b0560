"""Tracks which stage changes a buffer in forward: its ranks have the current value. Other ranks' copies stay as they
were.
"""

from __future__ import annotations

from collections.abc import Sequence

from zgraph.errors import UnsupportedError
from zgraph.program.program import InputRole, OutputRole, Program

__all__ = ["Buffers"]


class Buffers:
    """The changed buffers of one model in stages, over all signatures that it was compiled for so far."""

    def __init__(self) -> None:
        self._changed: dict[str, int] = {}
        self._used: dict[str, frozenset[int]] = {}

    def note(self, name: str, programs: Sequence[Program], rank_of: Sequence[int]) -> None:
        """Note the stages' programs of one more signature, and each one's position along "pp". Raises
        `UnsupportedError`, and notes nothing, if a buffer that is changed at one position is read at another.
        """
        changed, used = dict(self._changed), dict(self._used)
        for program, position in zip(programs, rank_of, strict=True):
            for port in program.inputs:
                if port.role is InputRole.BUFFER:
                    used[port.name] = used.get(port.name, frozenset()) | {position}
            for port in program.outputs:
                if port.role is OutputRole.MUTATION and port.of is InputRole.BUFFER:
                    changed[port.name] = position
        for buffer, position in changed.items():
            if used.get(buffer, frozenset()) - {position}:
                raise UnsupportedError(
                    f"buffer {buffer!r} is changed at position {position} of 'pp', and read at {sorted(used[buffer] - {position})}",
                    where="partition",
                    why=f"{name} has it in another stage than the programs before",
                    hint="partition=[module paths], with the module inside a stage",
                )
        self._changed, self._used = changed, used

    def at(self, name: str) -> int:
        """Return the position along "pp" that has the current value of a buffer; the first position for a buffer that
        no forward changes.
        """
        return self._changed.get(name, 0)

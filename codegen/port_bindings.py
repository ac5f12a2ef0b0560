"""Binds a program's ports to values: a source for each input, the purpose of each output; read from the ports once,
when it first runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from zgraph.program.program import InputRole, OutputRole, Port, Program

Source = Callable[[Any], Any]
"""Gives the value of an input, by the port's name or its flat position."""

_NUMBER = {role: at for at, role in enumerate(InputRole)}
_BY_POSITION = (InputRole.INPUT, InputRole.BUFFER, InputRole.CONSTANT, InputRole.TANGENT)


class Sources:
    """Where the values of a program's inputs come from: a function for each role."""

    def __init__(self, by_role: Mapping[InputRole, Source]) -> None:
        self.functions: list[Source] = [_nowhere] * len(_NUMBER)
        self._set(by_role)

    def and_for_call(self, by_role: Mapping[InputRole, Source]) -> Sources:
        """Return these sources, with those of one call added."""
        sources = Sources.__new__(Sources)
        sources.functions = self.functions.copy()
        sources._set(by_role)
        return sources

    def _set(self, by_role: Mapping[InputRole, Source]) -> None:
        for role, source in by_role.items():
            self.functions[_NUMBER[role]] = source


def _nowhere(key: Any) -> Any:
    raise AssertionError(f"nothing gives the input {key!r} here")


class Bindings:
    """The inputs and outputs of one program, by what they are for."""

    def __init__(self, program: Program) -> None:
        self._inputs: Sequence[Port] = program.inputs
        self._slots = [(_NUMBER[p.role], p.index if p.role in _BY_POSITION else p.name) for p in program.inputs]  # type: ignore[index]
        self._positions: dict[Collection[InputRole], tuple[int, ...]] = {}
        self._outputs: dict[OutputRole, list[tuple[int, Port]]] = {role: [] for role in OutputRole}
        for at, port in enumerate(program.outputs):
            self._outputs[port.role].append((at, port))  # type: ignore[index]

    def values(self, sources: Sources) -> list[Any]:
        """Return the values of the program's inputs, in its order."""
        functions = sources.functions
        return [functions[number](key) for number, key in self._slots]

    def positions(self, roles: frozenset[InputRole]) -> tuple[int, ...]:
        """Return the positions of the inputs that have one of these roles."""
        if roles not in self._positions:
            self._positions[roles] = tuple(at for at, port in enumerate(self._inputs) if port.role in roles)
        return self._positions[roles]

    def outputs(self, role: OutputRole) -> list[tuple[int, Port]]:
        """Return positions and ports of the outputs that have this role."""
        return self._outputs[role]

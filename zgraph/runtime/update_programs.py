"""Builds, compiles and caches the update programs of one compiled module, one for each set of parameters with
gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zgraph.build.update_program import update_history
from zgraph.codegen.debug_mode import checked
from zgraph.codegen.eager import compile_eager
from zgraph.codegen.executable import Executable
from zgraph.codegen.port_bindings import Bindings
from zgraph.codegen.update_chunks import UpdateExecutable, compile_chunk, compile_chunks
from zgraph.passes import History, verify_program
from zgraph.plan.optimizers import UpdateKind
from zgraph.program.program import Program
from zgraph.runtime.delayed_updates import refuse_late_collectives
from zgraph.runtime.rank import Rank
from zgraph.torch_compat.compile_lock import RARE_COLLECTIONS
from zgraph.update.build_update import UpdateOptions, scalar_names
from zgraph.update.owned_parameters import mesh_of, specs_here
from zgraph.update.parameter_groups import Member
from zgraph.update.states import States

_Key = tuple[
    tuple[tuple[str, str], ...], UpdateKind, float | None
]  # (name, count) of each parameter, what ranks share, the norm


@dataclass(frozen=True)
class CompiledUpdate:
    """An update program and what runs it."""

    history: History  # how the passes built the program
    executable: UpdateExecutable  # its compiled chunks
    numbers: list[tuple[int, str]]  # the program's scalars (see `scalar_names`)
    clipped: tuple[str, ...]  # parameters whose gradients it only clips

    @functools.cached_property
    def bindings(self) -> Bindings:
        """The program's inputs and outputs by role."""
        return Bindings(self.history.program)


class UpdatePrograms:
    """The update programs that one rank has made so far."""

    def __init__(self, rank: Rank, states: States) -> None:
        self.rank = rank
        self.states = states
        self._programs: dict[_Key, CompiledUpdate] = {}
        self._last: tuple[tuple[str, ...], CompiledUpdate] | None = None

    def histories(self) -> dict[str, History]:
        """Return how the passes built each update program, by name: "update0", …"""
        return {update.history.program.name: update.history for update in self._programs.values()}

    def compiled(self) -> list[CompiledUpdate]:
        return list(self._programs.values())

    def executables(self) -> list[Executable]:
        return [e for update in self._programs.values() for e in update.executable.executables]

    def forget_last(self) -> None:
        """Forget the last program, so that the next update looks for its own again: which parameters share a count of
        updates may have changed.
        """
        self._last = None

    def clear(self) -> None:
        """Forget all programs: states are stored elsewhere from now on."""
        self._programs.clear()
        self._last = None

    def of(self, names: tuple[str, ...], options: UpdateOptions) -> CompiledUpdate:
        """Return the update of the parameters of these names (a parameter without a gradient is left alone, as in
        torch).
        """
        if self._last is not None and self._last[0] == names:
            return self._last[1]
        self.states.count_apart(names)
        members = [self.states.members.get(n, Member(n, None, -1)) for n in names]
        key = tuple((m.name, m.count) for m in members), options.kind, options.clip_norm
        if key not in self._programs:
            self._programs[key] = self._make(members, options)
        self._last = names, self._programs[key]
        return self._programs[key]

    @RARE_COLLECTIONS
    def _make(self, members: Sequence[Member], options: UpdateOptions) -> CompiledUpdate:
        rank = self.rank
        history = update_history(
            rank.plan,
            members,
            specs_here(rank.shards.specs, rank.held),
            mesh_of(rank.sizes, rank.held),
            rank.device,
            options,
            f"update{len(self._programs)}",
            rank.first_gathers.order(),
        )
        rank.votes.program(history.program)
        executable = compile_chunks(history.program, self._compiler(history.program.name), options.late())
        refuse_late_collectives(executable)
        for chunk in executable.chunks:
            verify_program(chunk.executable.program)
        clipped = tuple(m.name for m in members if m.record is None)
        return CompiledUpdate(history, executable, scalar_names(members, options), clipped)

    def _compiler(self, name: str) -> Callable[[Program], Executable]:
        """Return a function that compiles a chunk of the update program of this name, or loads it from the cache."""
        rank = self.rank
        if rank.plan.backend != "inductor":
            return lambda part: checked(compile_eager(part, rank.groups), rank.groups)
        code_cache = rank.keeper.code(name) if rank.keeper is not None else None
        return lambda part: checked(compile_chunk(part, rank.groups, code_cache), rank.groups)

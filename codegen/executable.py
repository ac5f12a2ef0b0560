"""A program that can be run: a callable over a list of values, with what its inputs and outputs are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zgraph.codegen.lower_collectives import fit
from zgraph.codegen.port_bindings import Bindings
from zgraph.errors import AssertionError
from zgraph.program import collectives, ops, transfers_to_host
from zgraph.program.aliases import mutates, root_of
from zgraph.program.layout import Strides, laid_out, promised, promised_at
from zgraph.program.lazy_program import LazyProgram
from zgraph.program.node import info, place_of
from zgraph.program.program import InputRole, OutputRole, Program
from zgraph.ranks import progress
from zgraph.ranks.thread_stacks import StackFrame
from zgraph.torch_compat import autograd_state

# The user's tensors, tangents from autograd, and received values: no program chooses their strides.
_OTHERS_DECIDE = (
    InputRole.INPUT,
    InputRole.CONSTANT,
    InputRole.BUFFER,
    InputRole.TANGENT,
    InputRole.ACCUMULATOR,
    InputRole.RECEIVED,
    InputRole.RETURNED,
    InputRole.GRADIENT,
)


def positions_of_sizes(program: Program) -> tuple[int, ...]:
    """Return the positions of a program's inputs that are sizes, in the order of its symbols."""
    at = {p.name: i for i, p in enumerate(program.inputs) if p.role is InputRole.SIZE}
    return tuple(at[s.name] for s in program.sizes.symbols)


@dataclass(frozen=True)
class Kernel:
    """A kernel in generated code."""

    name: str  # its name in the generated code
    operators: tuple[str, ...]  # the operators that it computes
    calls: int = 1  # how often it is launched


@dataclass(frozen=True)
class Edge:
    """What running a program needs to know of its graph's inputs and outputs."""

    flying: tuple[str, ...]  # names of saved values whose collective is still running when the program ends
    away: frozenset[int]  # positions of outputs that are offloaded when the program ends
    transferred: frozenset[int]  # positions of outputs that are a collective's result or a view of it
    # (position, strides that the program was compiled for) of inputs whose strides others choose, but for inputs that
    # it writes to: a copy would take the write
    from_outside: tuple[tuple[int, Strides], ...]

    def said(self) -> dict[str, Any]:
        """Return this record as JSON's types."""
        rest = {"away": sorted(self.away), "transferred": sorted(self.transferred)}
        return {"flying": list(self.flying), **rest, "from_outside": [[at, list(s)] for at, s in self.from_outside]}


def edge_of(program: Program) -> Edge:
    """Return a program's `Edge`: from its graph, or, for a program that is stored as text, from what was stored with
    it."""
    if isinstance(program, LazyProgram) and not program.is_made and program.said:
        said = program.said
        outside = tuple((at, tuple(strides)) for at, strides in said["from_outside"])
        return Edge(tuple(said["flying"]), frozenset(said["away"]), frozenset(said["transferred"]), outside)
    outputs = list(program.output_items())
    flying = [p.name for p, node in outputs if p.role is OutputRole.SAVED and collectives.is_start(node)]
    away = [at for at, (_, node) in enumerate(outputs) if info(node).home is not None]
    transferred = [at for at, (_, node) in enumerate(outputs) if collectives.is_wait(root_of(node))]
    others = ((at, promised(node)) for at, node in _given_by_others(program))
    known = tuple((at, strides) for at, strides in others if strides is not None)
    return Edge(tuple(flying), frozenset(away), frozenset(transferred), known)


def _given_by_others(program: Program) -> Iterator[tuple[int, fx.Node]]:
    """Yield (position, node) of each input whose strides others choose and that the program does not write to."""
    for at, (port, node) in enumerate(program.input_items()):
        if port.role in _OTHERS_DECIDE and not any(mutates(u) for u in node.users):
            yield at, node


@dataclass
class Executable:
    """`run(values)` takes the inputs as one list, which it empties, and returns the outputs, in the program's order."""

    program: Program  # the program that it runs
    function: Callable[[list[Any]], Sequence[Any]]  # the compiled callable
    source: str  # the code that runs
    kernels: tuple[Kernel, ...] = ()  # what Inductor generated; empty for eager
    # what Inductor calls instead (a BLAS product, torch's own kernel); empty for eager
    library: tuple[Kernel, ...] = ()
    strides: list[Any] = field(default_factory=list)  # of each output, where Inductor chose them
    # (line of the source from 0, position in the graph) of nodes that run by a call of their own
    calls: tuple[tuple[int, int], ...] = ()
    # makes a function of an edited source, with some names in its scope
    rebuild: Callable[[str, dict[str, Any]], Callable[[list[Any]], Sequence[Any]]] | None = None

    @functools.cached_property
    def bindings(self) -> Bindings:
        """Its inputs and outputs by what they are for."""
        return Bindings(self.program)

    @functools.cached_property
    def edge(self) -> Edge:
        """What running it needs to know of its graph's inputs and outputs."""
        return edge_of(self.program)

    @property
    def flying(self) -> tuple[str, ...]:
        """Names of the saved values whose collective is still running when this program ends: the next program waits
        for them."""
        return self.edge.flying

    @property
    def away(self) -> frozenset[int]:
        """Positions of the outputs that are offloaded when this program ends."""
        return self.edge.away

    @property
    def transferred(self) -> frozenset[int]:
        """Positions of the outputs that are a collective's result or a view of it."""
        return self.edge.transferred

    @functools.cached_property
    def sized(self) -> tuple[int, ...]:
        """Positions of the inputs that are sizes (`positions_of_sizes`)."""
        return positions_of_sizes(self.program)

    @functools.cached_property
    def _sized_from_outside(self) -> tuple[tuple[int, Callable[..., Strides]], ...]:
        """`Edge.from_outside` for inputs whose strides depend on the call's sizes: (position, strides by sizes)."""
        names = tuple(s.name for s in self.program.sizes.symbols)
        formulas = ((at, promised_at(node, names)) for at, node in _given_by_others(self.program))
        return tuple((at, strides) for at, strides in formulas if strides is not None)

    def _lay_out_sized(self, values: list[Any]) -> None:
        point = [values[at] for at in self.sized]
        for at, strides in self._sized_from_outside:
            wanted = strides(*point)
            if values[at].stride() != wanted:
                values[at] = laid_out(values[at], wanted)

    def running_node(self, stack: Sequence[StackFrame]) -> fx.Node | None:
        """Return the program's node that a thread with this stack is executing, or None if it can't be told."""
        lines = self.source.splitlines()
        by_name = {n.name: n for n in self.program.graph.nodes}
        for line in stack:
            if (line.file, line.function) == (Executable.run.__code__.co_filename, Executable.run.__name__):
                return None
            if line.function in ("forward", "call") and 0 < line.number <= len(lines):
                node = _node_at(lines, line.number - 1, by_name)
                if node is not None:
                    return node
        return None

    def run(self, values: list[Any]) -> Sequence[Any]:
        """Run the program on `values`; inputs whose strides others choose are first laid out as it was compiled for."""
        for at, strides in self.edge.from_outside:
            if values[at].stride() != strides:
                values[at] = laid_out(values[at], strides)
        if self.program.sizes:
            self._lay_out_sized(values)
        told = progress.enter(self)
        try:
            with (
                autograd_state.below_autograd(),
                torch.autograd.profiler.record_function(f"zgraph:{self.program.name}"),
            ):
                outputs = self.function(values)
                if self.flying and torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
                    self._land(outputs)
                return outputs
        except Exception as error:
            transfers_to_host.failed()
            raise explain(error, self) from error
        except BaseException:  # (an interrupt)
            transfers_to_host.failed()
            raise
        finally:
            if told:
                progress.leave()

    def _land(self, outputs: Sequence[Any]) -> None:
        """Wait for collectives that are still running, on CPU: the profile may end before the program that would wait
        for them."""
        with autograd_state.unrecorded():
            for port, value in zip(self.program.outputs, outputs, strict=True):
                if port.name in self.flying and not value.is_cuda:
                    collectives.WAIT(value)


def explain(error: Exception, executable: Executable) -> Exception:
    """Return a `CollectiveError` that names the collective and its module for a failed collective; return other errors
    as they are."""
    node = failing_node(error, executable)
    if isinstance(error, AssertionError):
        error.where = info(node).source or None if node is not None else None
        return error
    if node is None or not (collectives.is_start(node) or collectives.is_wait(node)):
        return error
    start = node if collectives.is_start(node) else collectives.start_of(node)
    what = f"collective {start.name!r} over {info(start).mesh_dim!r} failed in {executable.program.name}"
    return progress.failed_collective(what, place_of(start), error, start)


def failing_node(error: BaseException, executable: Executable) -> fx.Node | None:
    """Return the program's node whose line of the generated code raised, or None if it can't be told."""
    lines = executable.source.splitlines()
    traceback = error.__traceback__
    node: fx.Node | None = None
    by_name = {n.name: n for n in executable.program.graph.nodes}
    while traceback is not None:
        code, line = traceback.tb_frame.f_code, traceback.tb_lineno
        if code.co_name in ("forward", "call") and 0 < line <= len(lines):
            node = _node_at(lines, line - 1, by_name) or node
        traceback = traceback.tb_next
    return node


def _node_at(lines: list[str], at: int, by_name: dict[str, fx.Node]) -> fx.Node | None:
    text = lines[at].strip()
    name = text.split("=")[0].split(":")[0].strip()
    if name in by_name:
        return by_name[name]
    for above in range(at, max(-1, at - 8), -1):  # Inductor writes the nodes of a call in a comment before it
        comment = lines[above].strip()
        if comment.startswith("# Topologically Sorted Source Nodes: ["):
            names = comment.split("[", 1)[1].split("]", 1)[0].split(", ")
            return next((by_name[n] for n in names if n in by_name), None)
    return None


def lowered(program: Program, groups: dict[str, str]) -> Program:
    """Return a copy for code generation: collectives as their backend takes them, no release marks."""
    copy = program.snapshot()
    for node in copy.graph.find_nodes(op="call_function", target=ops.RELEASE):
        copy.graph.erase_node(node)
    fit(copy, groups)
    copy.recompile()
    return copy

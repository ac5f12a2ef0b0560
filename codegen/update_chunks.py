"""An update program as few compiled pieces: what several parameters have in common is compiled once.

Compiled whole, an update of 300 parameters takes Inductor most of a minute. So each of its groups
(`zgraph/passes/update/group_updates.py`) is a chunk, and chunks with equal graphs share one executable. Transfers to
and from tiers run operator by operator between groups.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from zgraph.codegen.code_cache import CodeCache
from zgraph.codegen.eager import compile_eager
from zgraph.codegen.executable import Executable
from zgraph.codegen.inductor import compile_inductor
from zgraph.passes.update.group_updates import groups_of, type_text
from zgraph.program import transfers_to_host
from zgraph.program.aliases import is_write
from zgraph.program.node import NodeInfo, Phase, info, set_info, value
from zgraph.program.program import InputRole, Level, OutputRole, Port, Program
from zgraph.torch_compat import fx_graphs
from zgraph.torch_compat.kernel_files import kernels_together


@dataclass(frozen=True, eq=False)
class Chunk:
    """A part of an update program."""

    executable: Executable  # what runs it
    takes: tuple[str, ...]  # names of the values that it reads
    gives: tuple[str, ...]  # names of the values that it computes
    writes: tuple[str, ...] = ()  # parameters whose shards it writes


class UpdateExecutable:
    """Runs an update's chunks over values by name; each value is freed after its last use.

    Chunks that only the parameters in `late` need run after all others, and may run later.
    """

    def __init__(self, program: Program, chunks: list[Chunk], late: Collection[str] = ()) -> None:
        self.program = program
        apart = _late(chunks, late)
        self.chunks = [c for c in chunks if c not in apart] + apart
        self._now = len(chunks) - len(apart)
        last: dict[str, int] = {name: i for i, chunk in enumerate(self.chunks) for name in chunk.takes}
        results = {node.name for node in program.output_values()}
        self._drops = [[n for n in c.takes if last[n] == i and n not in results] for i, c in enumerate(self.chunks)]

    @property
    def late(self) -> list[Chunk]:
        """The chunks that may run later."""
        return self.chunks[self._now :]

    def run(
        self, values: list[Any], written: Callable[[Sequence[str]], None] = lambda names: None
    ) -> tuple[list[Any], Callable[[], None]]:
        """Return the values of the program's outputs, and a function that runs the late chunks.

        `values` are those of the inputs in order; the list is emptied. `written` is called with the names of
        parameters whose update is done.
        """
        live_values = dict(zip((n.name for n in self.program.placeholders()), values, strict=True))
        values.clear()
        for at in range(self._now):
            self._chunk(at, live_values)
            written(self.chunks[at].writes)
        results = [live_values[n.name] for n in self.program.output_values()]

        def rest() -> None:
            for at in range(self._now, len(self.chunks)):
                for tensor in (live_values[n] for n in self.chunks[at].takes):
                    if tensor.is_cuda:  # (made for another stream, which may use its memory again)
                        tensor.record_stream(torch.cuda.current_stream(tensor.device))
                self._chunk(at, live_values)

        return results, rest

    def _chunk(self, at: int, held: dict[str, Any]) -> None:
        chunk = self.chunks[at]
        taken = [held[n] for n in chunk.takes]
        for name in self._drops[at]:
            del held[name]
        held.update(zip(chunk.gives, chunk.executable.run(taken), strict=True))

    @property
    def executables(self) -> list[Executable]:
        """The compiled ones: one for each kind of chunk."""
        return list({id(c.executable.function): c.executable for c in self.chunks}.values())


def _late(chunks: list[Chunk], params: Collection[str]) -> list[Chunk]:
    """Return the chunks that serve these parameters alone, and transfers, whose results no other chunk takes."""

    def only(chunk: Chunk) -> bool:
        nodes = [n for n in chunk.executable.program.graph.nodes if n.op == "call_function"]
        return all(
            info(n).param in params or (transfers_to_host.is_host_transfer(n) and info(n).param is None) for n in nodes
        )

    late_chunks = [c for c in chunks if params and only(c)]
    while True:
        needed = {name for c in chunks if c not in late_chunks for name in c.takes}
        left = [c for c in late_chunks if not needed.intersection(c.gives)]
        if len(left) == len(late_chunks):
            return late_chunks
        late_chunks = left


def compile_chunks(
    program: Program, compile_one: Callable[[Program], Executable], late: Collection[str] = ()
) -> UpdateExecutable:
    """Compile each kind of chunk of `program` once (in place and grouped, see `write_in_place` and `group_updates`).

    For `late` see `UpdateExecutable`.
    """
    executables: dict[str, Executable] = {}
    chunks: list[Chunk] = []
    places = {node: port.name for port, node in program.input_items() if port.role is InputRole.PARAMETER}
    with kernels_together():
        for nodes in groups_of(program):
            part = _part(program, nodes, len(chunks))
            key = canonical(part)
            if key not in executables:
                executables[key] = compile_one(part)
            executable = replace(executables[key], program=part)
            gives = tuple(p.name for p in part.outputs)
            writes = tuple(
                places[n.all_input_nodes[0]] for n in nodes if is_write(n) and n.all_input_nodes[0] in places
            )
            chunks.append(Chunk(executable, tuple(p.name for p in part.inputs), gives, writes))
    return UpdateExecutable(program, chunks, late)


def compile_chunk(part: Program, groups: dict[str, str], kept: CodeCache | None = None) -> Executable:
    """Compile a chunk with Inductor, or take its code from the cache `kept`; a chunk of transfers runs eagerly.

    On CUDA the updates of several parameters become one kernel; updates of numbers do not (torch 2.13 fails to combine
    those of half precision). Muon's iteration in bfloat16 rounds as torch's does: keeping intermediate values in
    float32 would change an update by 1%.
    """
    if any(transfers_to_host.is_host_transfer(n) for n in part.graph.nodes):
        return compile_eager(part, groups)
    own = any(info(n).param is not None for n in part.graph.nodes if n.op == "call_function")
    return compile_inductor(part, groups, fix_saved=True, combine=own, round_each=True, kept=kept)


def canonical(part: Program) -> str:
    """Return a program's operators, arguments and types without names: equal for programs that are compiled alike."""
    at = {node: f"v{i}" for i, node in enumerate(part.graph.nodes)}
    lines = []
    for node in part.graph.nodes:
        args = repr(fx.node.map_arg((node.args, node.kwargs), lambda n: at[n]))
        target = node.target if node.op != "placeholder" else ""
        lines.append(f"{node.op} {target} {args} {type_text(value(node))}")
    return "\n".join(lines)


def _part(program: Program, nodes: list[fx.Node], number: int) -> Program:
    inside = set(nodes)
    taken = {a: None for n in nodes for a in n.all_input_nodes if a not in inside and a.op != "get_attr"}
    results = set(program.output_values())
    given = [
        n
        for n in nodes
        if (transfers_to_host.is_start(n) or not is_write(n))
        and (n in results or any(u not in inside for u in n.users))
    ]
    graph = fx.Graph()
    memo: dict[fx.Node, fx.Node] = {}
    for node in taken:
        memo[node] = graph.placeholder(node.name)
        memo[node].meta = dict(node.meta)
    for node in nodes:
        for constant in node.all_input_nodes:
            if constant.op == "get_attr" and constant not in memo:
                memo[constant] = graph.node_copy(constant)
                memo[constant].meta = dict(constant.meta)
        memo[node] = graph.node_copy(node, lambda n: memo[n])
        memo[node].meta = dict(node.meta)
    set_info(graph.output(tuple(memo[n] for n in given)), NodeInfo(Phase.UPDATE))
    part = Program(
        name=f"{program.name}.{number}",
        module=fx_graphs.lazy_module(program.module, graph),
        inputs=[Port(InputRole.SAVED, n.name) for n in taken],
        outputs=[Port(OutputRole.SAVED, n.name) for n in given],
        mesh=dict(program.mesh),
        params=program.params,
        fake_mode=program.fake_mode,
        level=Level.EXECUTABLE,
        facts=set(program.facts),
    )
    part.recompile()
    return part

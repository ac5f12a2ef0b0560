"""An update program as few compiled pieces: what is the same for several parameters is compiled once.

An update does the same to each parameter, and a model's parameters come in few shapes: compiled whole, an update of 300
parameters takes Inductor most of a minute. So the program is cut into stages (numbers; each gradient's share of the
norm; the norm; each parameter's update), a stage into chunks of parameters with equal graphs, and chunks with equal
graphs share one executable. Chunks of 16 keep the calls' cost below 1% (benchmarks/update.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from zgraph.codegen.executable import Executable
from zgraph.codegen.inductor import compile_inductor
from zgraph.passes.aliases import aliases_of, is_write
from zgraph.program import torch_private
from zgraph.program.node import NodeInfo, Phase, info, set_info, value
from zgraph.program.program import InputRole, Level, OutputRole, Port, Program

CHUNK = 16


@dataclass(frozen=True)
class Chunk:
    """A part of an update: the names of the values it takes and gives, what runs it, the parameters whose shards it writes."""

    executable: Executable
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    writes: tuple[str, ...] = ()


class UpdateExecutable:
    """Runs an update's chunks in order over values by name, each of which dies after its last use."""

    def __init__(self, program: Program, chunks: list[Chunk]) -> None:
        self.program = program
        self.chunks = chunks
        last: dict[str, int] = {name: i for i, chunk in enumerate(chunks) for name in chunk.takes}
        results = {node.name for node in program.output_values()}
        self._drops = [[n for n in chunk.takes if last[n] == i and n not in results] for i, chunk in enumerate(chunks)]

    def run(self, values: list[Any], written: Callable[[Sequence[str]], None] = lambda names: None) -> list[Any]:
        """The values of the program's outputs; `values`, those of its inputs in order, is emptied. `written` is told the
        parameters that are done."""
        held = dict(zip((n.name for n in self.program.placeholders()), values, strict=True))
        values.clear()
        for chunk, drops in zip(self.chunks, self._drops, strict=True):
            taken = [held[n] for n in chunk.takes]
            for name in drops:
                del held[name]
            results = chunk.executable.run(taken)
            held.update(zip(chunk.gives, results, strict=True))
            written(chunk.writes)
        return [held[n.name] for n in self.program.output_values()]

    @property
    def executables(self) -> list[Executable]:
        """Those compiled: one for each kind of chunk."""
        return list({id(c.executable.function): c.executable for c in self.chunks}.values())


def compile_chunks(
    program: Program, compile_one: Callable[[Program], Executable], first: Sequence[str] = ()
) -> UpdateExecutable:
    """Cut `program` (in place already, see `write_in_place`) and compile each kind of chunk once. The parameters named in
    `first` are updated as early as they can be, in this order."""
    made: dict[str, Executable] = {}
    chunks: list[Chunk] = []
    places = {node: port.name for port, node in program.input_items() if port.role is InputRole.PARAMETER}
    for nodes in _cut(program, first):
        part = _part(program, nodes, len(chunks))
        key = _canonical(part)
        if key not in made:
            made[key] = compile_one(part)
        same = made[key]
        executable = replace(same, program=part)
        gives = tuple(p.name for p in part.outputs)
        writes = tuple(places[n.all_input_nodes[0]] for n in nodes if is_write(n) and n.all_input_nodes[0] in places)
        chunks.append(Chunk(executable, tuple(p.name for p in part.inputs), gives, writes))
    return UpdateExecutable(program, chunks)


def compile_chunk(part: Program, groups: dict[str, str]) -> Executable:
    """Compile a chunk with Inductor. On CUDA the updates of several parameters become one kernel; numbers do not (torch
    2.13 fails to combine those of half precision). Muon's iteration in bfloat16 rounds as torch's does: what a kernel
    keeps in float32 would be another 1% of an update."""
    own = any(info(n).param is not None for n in part.graph.nodes if n.op == "call_function")
    return compile_inductor(part, groups, fix_saved=True, combine=own, round_each=True)


def _cut(program: Program, first: Sequence[str]) -> list[list[fx.Node]]:
    """The nodes of each chunk, chunks in an order in which they can run."""
    found: dict[int, dict[str | None, list[fx.Node]]] = {}
    stages = _stages(program)
    for node in program.graph.nodes:
        if node in stages:
            found.setdefault(stages[node], {}).setdefault(info(node).param, []).append(node)
    chunks: list[list[fx.Node]] = []
    rank = {name: at for at, name in enumerate(first)}
    for stage in sorted(found):
        kinds: dict[str, list[list[fx.Node]]] = {}
        for _, nodes in sorted(found[stage].items(), key=lambda item: rank.get(str(item[0]), len(rank))):
            kinds.setdefault(_kind(nodes), []).append(nodes)
        for alike in kinds.values():
            for at in range(0, len(alike), CHUNK):
                chunks.append([n for nodes in alike[at : at + CHUNK] for n in nodes])
    return chunks


def _stages(program: Program) -> dict[fx.Node, int]:
    """Each operator's stage: even ones are of all parameters together, odd ones of each parameter by itself.

    Numbers are worked out as early as they can be, a parameter's own values as late: what two stages share is memory that
    lives between them, and is written and read once more.
    """
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    own = {n: int(info(n).param is not None) for n in nodes}
    early: dict[fx.Node, int] = {}
    for node in nodes:
        stage = max([early[a] for a in node.all_input_nodes if a in early], default=0)
        early[node] = stage + (stage + own[node]) % 2
    last = max([early[n] for n in nodes if own[n]], default=1)
    stages: dict[fx.Node, int] = {}
    for node in reversed(nodes):
        if is_write(node):
            continue
        users = [u for u in node.users if u in stages]
        late = min([stages[u] - (own[u] != own[node]) for u in users], default=last)
        stages[node] = late if own[node] else early[node]
    for node in nodes:
        if is_write(node):  # no reader of the old value may come in a later stage
            place, new = node.all_input_nodes[0], node.all_input_nodes[-1]
            readers = [u for alias in aliases_of(place) for u in alias.users]
            stage = max([stages[n] for n in [new, *readers] if n in stages], default=0)
            stages[node] = stage + (stage + own[node]) % 2
    return stages


def _kind(nodes: list[fx.Node]) -> str:
    """Equal for groups of nodes that compute the same from values of the same types."""
    at: dict[fx.Node, str] = {}

    def name(node: fx.Node) -> str:
        if node not in at:
            shared = node.op != "placeholder" and info(node).param is None
            at[node] = f"{node.name if shared else len(at)}:{_type(value(node))}"
        return at[node]

    lines = []
    for node in nodes:
        args = repr(fx.node.map_arg((node.args, node.kwargs), lambda n: name(n)))
        lines.append(f"{name(node)} = {node.target} {args}")
    return "\n".join(lines)


def _canonical(part: Program) -> str:
    at = {node: f"v{i}" for i, node in enumerate(part.graph.nodes)}
    lines = []
    for node in part.graph.nodes:
        args = repr(fx.node.map_arg((node.args, node.kwargs), lambda n: at[n]))
        target = node.target if node.op != "placeholder" else ""
        lines.append(f"{node.op} {target} {args} {_type(value(node))}")
    return "\n".join(lines)


def _type(val: Any) -> str:
    return f"{val.dtype}{list(val.shape)}{list(val.stride())}" if isinstance(val, torch.Tensor) else str(type(val))


def _part(program: Program, nodes: list[fx.Node], number: int) -> Program:
    inside = set(nodes)
    taken = {a: None for n in nodes for a in n.all_input_nodes if a not in inside and a.op != "get_attr"}
    results = set(program.output_values())
    given = [n for n in nodes if not is_write(n) and (n in results or any(u not in inside for u in n.users))]
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
        module=torch_private.lazy_module(program.module, graph),
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

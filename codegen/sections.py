"""A finished program in sections, cut where layers begin and end: Inductor then compiles equal ones only once.

*Contract.* Sections run one after another compute what the program does, and communicate in its order: the only nodes
that move draw no random numbers, wait for nothing and allocate no memory. What crosses a cut is a tensor: a view is
repeated behind it, a constant filled again, and a collective may be running across it, whose operand lives until it is
waited for. Neighbours that equal no other section are joined, so what a model computes once is compiled as it would be
in a whole program.

    node               in the layers.N of its module; a layer whose nodes are recomputed elsewhere begins where most of them are
    section            nodes between two cuts, in order, with views and constants of others where they are read; of an update
                       the nodes of one parameter
    key                operators, arguments, types and lifetimes without names: equal if Inductor makes the same code of them
"""

from __future__ import annotations

import bisect
import functools
import operator
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zgraph.names import layer_path
from zgraph.passes.update.group_updates import type_text
from zgraph.program import collectives, transfers_to_host
from zgraph.program.aliases import is_view, is_write, root_of
from zgraph.program.node import Phase, Role, has_info, info, value
from zgraph.program.program import Program
from zgraph.torch_compat import fx_graphs

# A program stays whole below these limits: each cut prevents fusions across it, and adds kernels on both sides.
MIN_SHARE = 0.25  # the share of a program's operators that need not be compiled
MIN_FEWER = 400  # operators that need not be compiled: about two seconds (benchmarks/compile_time.py)
MIN_SIZE = 16  # operators in a section, on average

_DEPTHS = (1, 2)  # layers may be in layers, as in T5's blocks; the outer ones are tried first

aten, prims = torch.ops.aten, torch.ops.prims
_WITH_OPERAND = (operator.getitem, prims.inductor_lookup_seed.default)  # they are in the section of their operand
_FILLED = (aten.full.default, aten.scalar_tensor.default, prims.iota.default)
_READS_OPERAND = {*collectives.known_targets(), *collectives.COALESCED.values()} - {
    collectives.ALL_REDUCE,  # (in place on a copy, or on what nothing else reads)
    collectives.COALESCED[collectives.ALL_REDUCE],
}


@dataclass(frozen=True, eq=False)
class Section:
    """A section of a program."""

    nodes: tuple[fx.Node, ...]  # the program's nodes, in the order in which they run
    takes: tuple[fx.Node, ...]  # values that it reads from outside
    gives: tuple[fx.Node, ...]  # values that later sections or the caller read
    held: frozenset[fx.Node]  # those of `takes` that live on after it
    fixed: frozenset[fx.Node]  # those of `gives` that have the program's strides
    drops: tuple[fx.Node, ...] = ()  # those of `takes` that are freed as it takes them
    after: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)  # values that are freed after a wait, by the wait

    def names(self) -> dict[fx.Node, str]:
        """Return the name of each node in `module`: the same in equal sections."""
        return {node: f"v{i}" for i, node in enumerate((*self.takes, *self.nodes))}

    @functools.cached_property
    def key(self) -> str:
        """A text that is equal for sections of which Inductor makes the same code."""
        at = self.names()
        chunks: dict[str | None, int] = {None: 0}
        lines = [f"{at[n]} {type_text(value(n))} {_offset(n)} {n in self.held}" for n in self.takes]
        for node in self.nodes:
            args = repr(fx.node.map_arg((node.args, node.kwargs), lambda n: at[n]))
            target = node.target if node.op == "get_attr" else str(node.target)
            own = ""
            if has_info(node):
                record = info(node)
                own = f"{chunks.setdefault(record.chunk, len(chunks))} {record.copy_of is not None}"
            realized = fx_graphs.has_fixed_strides(node)
            lines.append(f"{target} {args} {_types(value(node))} {own} {realized}")
        lines += [f"{at[n]} {n in self.fixed}" for n in self.gives]
        return "\n".join(lines)

    def module(self, root: fx.GraphModule) -> fx.GraphModule:
        """Return a graph module of its own, with names that are the same in equal sections. `root` has the program's
        constants."""
        at = self.names()
        graph = fx.Graph()
        memo: dict[fx.Node, fx.Node] = {}
        for node in self.takes:
            memo[node] = graph.placeholder(at[node])
        for node in self.nodes:
            copied = graph.node_copy(node, lambda n: memo[n])
            copied._rename(at[node])
            memo[node] = copied
        for node, copied in memo.items():
            copied.meta = dict(node.meta)
        graph.output(tuple(memo[n] for n in self.gives))
        graph.lint()
        return fx_graphs.lazy_module(root, graph)


def sections(program: Program, held: Set[fx.Node], fixed: Set[fx.Node]) -> list[Section]:
    """Return the sections of a program that is ready for code generation (see `lowered`), or none where it is to be
    compiled whole.

    It is compiled whole if it has no layers, few equal ones, symbolic sizes, transfers to or from host memory, or work
    that ranks divide (`tp`, `cp`). The sections of an update are its parameters; on accelerators it is compiled whole,
    since one kernel is launched for all of them. `held` are the inputs that outlive it, `fixed` the outputs whose
    strides are the program's.
    """
    if program.sizes or any(transfers_to_host.is_host_transfer(n) or _is_exchange(n) for n in program.graph.nodes):
        return []
    is_update = all(has_info(n) and info(n).phase is Phase.UPDATE for n in _calls(program))
    inputs = {n: v for n in program.placeholders() if isinstance(v := value(n), torch.Tensor)}
    if is_update and any(v.is_cuda for v in inputs.values()):
        return []
    fewer_nodes, size = (1, 1) if is_update else (MIN_FEWER, MIN_SIZE)
    if is_update:  # (numbers that all parameters read do not end with one of them)
        held = {*held, *(n for n, v in inputs.items() if v.dim() == 0)}
    for starts in [_starts_of_parameters(program)] if is_update else (_starts(program, depth) for depth in _DEPTHS):
        try:
            candidates = _with_unequal_joined(program, held, fixed, starts)
        except _NotTensors:
            continue
        kinds = {s.key: len(s.nodes) for s in candidates}
        whole = sum(len(s.nodes) for s in candidates)
        fewer = whole - sum(kinds.values())
        if fewer >= max(fewer_nodes, MIN_SHARE * whole) and whole >= size * len(candidates):
            return candidates
    return []


def _with_unequal_joined(program: Program, held: Set[fx.Node], fixed: Set[fx.Node], starts: list[int]) -> list[Section]:
    """Return the sections that begin at these calls; neighbouring sections that equal no other are joined to one."""
    keys = [s.key for s in _Cut(program, held, fixed, starts).sections()]
    times = Counter(keys)
    alone = [times[key] == 1 for key in keys]
    begins = [s for at, s in enumerate(starts) if not (at and alone[at] and alone[at - 1])]
    return [s for s in _Cut(program, held, fixed, begins).sections() if s.nodes]


def layer_of(node: fx.Node, depth: int) -> str | None:
    """Return the path of the layer that a node belongs to (see `layer_path`)."""
    return layer_path(info(node).module, depth) if has_info(node) else None


def _starts(program: Program, depth: int) -> list[int]:
    """Return the positions among a program's calls at which sections begin: the first call, where layers begin, behind
    the last layer."""
    places: dict[str, list[int]] = defaultdict(list)
    computing = []
    for at, node in enumerate(_calls(program)):
        if has_info(node) and info(node).role is Role.COMPUTE:
            computing.append(at)
            layer = layer_of(node, depth)
            if layer is not None:
                places[layer].append(at)
    starts = {0}
    before = last = -1  # the middle and the end of the layer before
    for middle, layer in sorted((statistics.median_low(own), layer) for layer, own in places.items()):
        starts.add(next(at for at in places[layer] if at > before))
        before, last = middle, places[layer][-1]
    starts.update(computing[bisect.bisect(computing, last) :][:1])
    return sorted(starts)


def _starts_of_parameters(program: Program) -> list[int]:
    """Return the positions among an update's calls at which those of another parameter begin."""
    own = [info(node).param for node in _calls(program)]
    return [at for at, param in enumerate(own) if at == 0 or param != own[at - 1]]


def _calls(program: Program) -> list[fx.Node]:
    return [n for n in program.graph.nodes if n.op == "call_function"]


class _NotTensors(Exception):
    """A value that is no tensor would cross a cut."""


class _Cut:
    """A program on its way into sections: the calls from one of the `starts` to the next are one section."""

    def __init__(self, program: Program, held: Set[fx.Node], fixed: Set[fx.Node], starts: list[int]) -> None:
        self.calls = _calls(program)
        self.held, self.fixed = held, fixed
        self.results = set(program.output_values())
        self.owner: dict[fx.Node, int] = {}  # the section that a call is in
        for at, node in enumerate(self.calls):
            first = node.all_input_nodes[0] if node.target in _WITH_OPERAND else None
            self.owner[node] = self.owner.get(first, 0) if first is not None else bisect.bisect(starts, at) - 1
        self.of: list[list[fx.Node]] = [[] for _ in starts]
        for node in self.calls:
            self.of[self.owner[node]].append(node)

    def sections(self) -> list[Section]:
        """Return all sections in order; one that has only repeated nodes is empty. Raises `_NotTensors`."""
        nodes = [list(self._nodes(number)) for number in range(len(self.of))]
        takes = [self._takes(number, own) for number, own in enumerate(nodes)]
        last = {node: number for number, taken in enumerate(takes) for node in taken}
        waits = self._waits()
        given = {*last, *self.results, *waits}
        all_sections = []
        for number, own in enumerate(nodes):
            gives = tuple(n for n in own if n in given and self.owner.get(n) == number)
            if not all(isinstance(value(n), torch.Tensor) for n in (*takes[number], *gives)):
                raise _NotTensors
            until = {n: self.owner[wait] for n, wait in waits.items()}
            mortal = [n for n in (*last, *waits) if n not in self.results and n not in self.held]
            ends = dict.fromkeys(n for n in mortal if max(last.get(n, 0), until.get(n, 0)) == number)
            after: dict[fx.Node, list[fx.Node]] = defaultdict(list)
            for node in ends:
                if until.get(node) == number:
                    after[waits[node]].append(node)
            drops = tuple(n for n in ends if until.get(n) != number)
            lives = frozenset(n for n in takes[number] if n not in ends)
            fixed = frozenset(n for n in gives if n in last or n in waits or n in self.fixed)
            all_sections.append(Section(tuple(own), takes[number], gives, lives, fixed, drops, dict(after)))
        return all_sections

    def _nodes(self, number: int) -> Iterator[fx.Node]:
        """Yield the nodes of a section in order: its own calls, and views and constants repeated before their first
        reader."""
        there: set[fx.Node] = set()
        for node in self.of[number]:
            if _is_repeated(node) and node not in self.results:
                continue
            yield from self._with_repeated(node, number, there)

    def _with_repeated(self, node: fx.Node, number: int, there: set[fx.Node]) -> Iterator[fx.Node]:
        if node in there:
            return
        there.add(node)
        for argument in node.all_input_nodes:
            if argument.op == "get_attr" or _is_repeated(argument):
                yield from self._with_repeated(argument, number, there)
        yield node

    def _takes(self, number: int, nodes: list[fx.Node]) -> tuple[fx.Node, ...]:
        inside = set(nodes)
        return tuple(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))

    def _waits(self) -> dict[fx.Node, fx.Node]:
        """Return the values that must live until a wait in a later section, since a collective of an earlier one reads
        them.

        Each value is given with the last such wait.
        """
        last_waits: dict[fx.Node, fx.Node] = {}
        for start in self.calls:
            if start.target not in _READS_OPERAND:
                continue
            ends = [start, *(u for u in start.users if u.target is operator.getitem)]
            for wait in sorted(w for end in ends for w in end.users if collectives.is_wait(w)):
                if self.owner[wait] != self.owner[start]:
                    last_waits.update((root_of(a), wait) for a in _operands(start) if root_of(a) not in self.held)
        return last_waits


def _is_exchange(node: fx.Node) -> bool:
    return has_info(node) and info(node).role is Role.EXCHANGE


def _operands(start: fx.Node) -> list[fx.Node]:
    given = start.args[0]
    return [a for a in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(a, fx.Node)]


def _is_repeated(node: fx.Node) -> bool:
    return node.target in _FILLED or (is_view(node) and not is_write(node))


def _offset(node: fx.Node) -> Any:
    val = value(node)
    return val.storage_offset() if isinstance(val, torch.Tensor) else None


def _types(val: Any) -> str:
    return f"({', '.join(map(_types, val))})" if isinstance(val, (tuple, list)) else type_text(val)

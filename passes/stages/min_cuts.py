"""Between which operators a captured forward can be cut, which operators then stand on either side, and which bytes
cross.

*Anchors* are the operators that read a parameter or do real arithmetic, in order. A cut lies between two of them, and
all anchors before it stand on its near side. The light operators between anchors are free: a minimum cut in bytes
decides (`AnchorChain.near`), in which

- a value counts once, however many read it on the far side, and whatever leaves the program is read there (the last stage gives it);
- what is made of inputs and buffers alone counts nothing: every stage makes it for itself (`free_nodes`);
- a view that is no smaller than its base counts nothing beside that: it is made again (`made_again`);
- members of an operator's tuple stay with it, and so do a random operator with the state that it leaves to another one, and all that
  reads or writes a buffer that the forward changes.

Later cuts have more on their near side. All minimise the same submodular function of their near side, and of the
smallest cuts the one with most on its near side is taken: so the near sides are nested (Topkis, 1978, "Minimizing a
Submodular Function on a Lattice").
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import networkx as nx
import torch
from torch import fx

from zgraph.passes.analysis.costs import flops_of, size_of
from zgraph.program.aliases import is_cast, is_random, is_view, made_once
from zgraph.program.node import Phase, info, tensors, value
from zgraph.program.program import InputRole, OutputRole, Program
from zgraph.program.sizes import typical

aten = torch.ops.aten
LIGHT_FLOP = 4  # FLOP for each element of a result: an outer product (rotary angles) is light, attention is not
_GIVEN = (InputRole.INPUT, InputRole.BUFFER, InputRole.CONSTANT, InputRole.SIZE)
_STATES = {"key", "seed", "offset", "rng_state"}  # names in schemas of a random state that an operator takes


@dataclass(frozen=True)
class Anchor:
    """An operator of the forward that reads parameters or does real arithmetic."""

    node: fx.Node  # the operator
    params: tuple[str, ...]  # names of the parameters that it reads, also through views and casts
    module: str  # the path of the user's module that it is in


@dataclass(frozen=True)
class Side:
    """The near side of a cut."""

    near: frozenset[fx.Node]  # the operators before the cut; free ones are on neither side
    bytes: int  # the bytes that cross the cut


@dataclass(frozen=True)
class Bond:
    """Operators that no cut may separate."""

    nodes: frozenset[fx.Node]  # the operators
    why: str  # the reason, with the name of one of them


def forward_nodes(program: Program) -> list[fx.Node]:
    """Return the operators of the forward, in order."""
    return [n for n in program.graph.nodes if n.op == "call_function" and info(n).phase is Phase.FORWARD]


def made_again(node: fx.Node) -> bool:
    """Return whether a value is made again where it is read, and never sent: a view that is no smaller than its base."""
    if not is_view(node) or not isinstance(value(node), torch.Tensor):
        return False
    base = node.all_input_nodes[0]
    return isinstance(value(base), torch.Tensor) and size_of(base) <= size_of(node)


def free_nodes(program: Program) -> set[fx.Node]:
    """Return the operators of the forward that every stage makes for itself, where it reads them.

    They are made of inputs, buffers and constants alone (masks, rotary tables, position ids), cheaply and not at
    random. What reads a buffer that the forward changes, or an input that wants a gradient, is not free: exactly one
    stage makes it.
    """
    changed = {p.name for p in program.outputs if p.role in (OutputRole.MUTATION, OutputRole.GRADIENT)}
    owned_inputs = {n for port, n in program.input_items() if port.role not in _GIVEN or port.name in changed}
    free: set[fx.Node] = set()
    for node in forward_nodes(program):
        operands = node.all_input_nodes
        has_free_operands = all(
            a in free or (a.op in ("placeholder", "get_attr") and a not in owned_inputs) for a in operands
        )
        if has_free_operands and not (made_once(node) or _draws(node) or _arithmetic(node)):
            free.add(node)
    return free


def anchors_of(program: Program) -> list[Anchor]:
    """Return the anchors of a program's forward, in order."""
    params = program.input_nodes(InputRole.PARAMETER)
    of = {node: name for name, node in params.items()}  # (and views, casts and copies of parameters)
    anchors = []
    for node in forward_nodes(program):
        base = node.all_input_nodes[0] if is_view(node) or is_cast(node) or node.target is aten.clone.default else None
        if base in of:
            of[node] = of[base]
            continue
        read = tuple(dict.fromkeys(of[a] for a in node.all_input_nodes if a in of))
        if read or _arithmetic(node):
            anchors.append(Anchor(node, read, info(node).module))
    return anchors


def _arithmetic(node: fx.Node) -> bool:
    return flops_of(node) > LIGHT_FLOP * sum(typical(t.numel()) for t in tensors(node))


def _draws(node: fx.Node) -> bool:
    """Return whether an operator draws numbers: from the device's random state, or from one that it is given."""
    if is_random(node):
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or not any(t.is_floating_point() for t in tensors(node)):
        return False
    given = zip(node.target._schema.arguments, node.args, strict=False)
    named = [v for a, v in given if a.name in _STATES] + [v for k, v in node.kwargs.items() if k in _STATES]
    return any(isinstance(v, fx.Node) and _whole_numbers(v) for v in named)


def _whole_numbers(node: fx.Node) -> bool:
    results = list(tensors(node))
    return bool(results) and not any(t.is_floating_point() or t.is_complex() or t.dtype is torch.bool for t in results)


def _random_bonds(nodes: Collection[fx.Node]) -> list[Bond]:
    """Return a bond for each pair of random operators of which one draws from the state that the other leaves."""
    bonds = []
    for source in nodes:
        if not _draws(source):
            continue
        reached: dict[fx.Node, None] = dict.fromkeys([source])
        for node in (stack := [source]):
            for user in node.users:
                carries = node is source and user.target is operator.getitem
                if user in reached or user not in nodes or not (carries or _whole_numbers(node)):
                    continue
                reached[user] = None
                if not _draws(user):
                    stack.append(user)
        for user in reached:
            if user is not source and _draws(user):
                way, back = {user}, [user]
                while back:
                    before = [a for a in back.pop().all_input_nodes if a in reached and a not in way]
                    way.update(before)
                    back += [a for a in before if a is not source]
                where = info(user).source
                why = f"{user.name} ({user.target}{', ' + where if where else ''}) draws from the random state that {source.name} leaves"
                bonds.append(Bond(_carriers(way, nodes), why))
    return bonds


def _buffer_bonds(program: Program, nodes: Collection[fx.Node]) -> list[Bond]:
    """Return a bond for each buffer that the forward changes: its readers, and what makes its new value. (Each stage
    has a buffer of its own.)
    """
    places = {(port.role, port.name): node for port, node in program.input_items()}
    bonds = []
    for port, new_value in program.output_items():
        if port.role is not OutputRole.MUTATION or port.of is None:
            continue
        members = {new_value}
        stack = [places[port.of, port.name]]
        while stack:
            for user in stack.pop().users:
                if user in nodes and user not in members:
                    members.add(user)
                    stack += [user] if is_view(user) else []
        bound = _carriers(members, nodes)
        if len(bound) > 1:
            bonds.append(Bond(bound, f"{port.of} {port.name!r} is changed by the forward and read on both sides"))
    return bonds


def _carriers(nodes: Iterable[fx.Node], known: Collection[fx.Node]) -> frozenset[fx.Node]:
    """Return the members of `known` that make these values, views aside."""
    return frozenset(c for c in map(carrier, nodes) if c in known)


def carrier(node: fx.Node) -> fx.Node:
    """Return the value that is sent where this one is read in another stage: the base of a view that is made again,
    else itself.
    """
    while made_again(node):
        node = node.all_input_nodes[0]
    return node


class AnchorChain:
    """A program's anchors in a row, and its minimum cuts. Position `q` lies before anchor `q` (and after the one before
    it).

    `nodes` are the operators of the forward in order, `free` those that every stage makes for itself, `solid` those
    whose values are made in one stage and sent to others: all but free ones and views that are made again.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.anchors = anchors_of(program)
        self.nodes = forward_nodes(program)
        self.free = free_nodes(program)
        self.solid = [n for n in self.nodes if n not in self.free and not made_again(n)]
        self._sides: dict[int, Side] = {}

    @cached_property
    def readers(self) -> dict[fx.Node, frozenset[fx.Node | None]]:
        """For each solid operator the solid ones that read it, also through views that are made again; None stands for
        the end of the program, which reads its outputs.
        """
        given = {n for port, n in self.program.output_items() if port.role is OutputRole.OUTPUT}
        solid = set(self.solid)
        readers: dict[fx.Node, set[fx.Node | None]] = {n: {None} if n in given else set() for n in self.nodes}
        for node in reversed(self.nodes):
            for operand in node.all_input_nodes:
                if operand in readers:
                    readers[operand] |= {node} if node in solid else readers[node]
        return {n: frozenset(readers[n]) for n in self.solid}

    @cached_property
    def bonds(self) -> list[Bond]:
        """Operators that no cut may separate."""
        nodes = dict.fromkeys(n for n in self.nodes if n not in self.free)
        return [*_random_bonds(nodes), *_buffer_bonds(self.program, nodes)]

    @cached_property
    def _together(self) -> list[list[fx.Node]]:
        """Operators that are always on the same side: those of bonds, and an operator with the members of its tuple."""
        tuples = [[n, *(r for r in self.readers[n] if r)] for n in self.solid if not isinstance(value(n), torch.Tensor)]
        return [sorted(bond.nodes) for bond in self.bonds] + tuples

    @cached_property
    def _range(self) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
        """For each solid operator the first anchor that depends on it and the last one that it depends on (or itself)."""
        first = dict.fromkeys(self.solid, len(self.anchors))
        last = dict.fromkeys(self.solid, -1)
        for i, anchor in enumerate(self.anchors):
            first[anchor.node] = last[anchor.node] = i
        while True:
            for node in self.solid:
                for reader in self.readers[node]:
                    if reader is not None:
                        last[reader] = max(last[reader], last[node])
            for node in reversed(self.solid):
                first[node] = min([first[node], *(first[r] for r in self.readers[node] if r is not None)])
            settled = True
            for nodes in self._together:
                lowest, highest = min(first[n] for n in nodes), max(last[n] for n in nodes)
                settled &= all((first[n], last[n]) == (lowest, highest) for n in nodes)
                first.update(dict.fromkeys(nodes, lowest))
                last.update(dict.fromkeys(nodes, highest))
            if settled:
                return first, last

    def refusal(self, position: int) -> str | None:
        """Return why there can be no cut at a position; None where there can."""
        first, last = self._range
        for bond in self.bonds:
            if any(first[n] < position <= last[n] for n in bond.nodes):
                return bond.why
        return None

    @cached_property
    def positions(self) -> list[int]:
        """The positions at which there can be a cut, in order."""
        return [q for q in range(1, len(self.anchors)) if self.refusal(q) is None]

    def near(self, position: int) -> Side:
        """Return the minimum cut at a position (one of `positions`), in bytes."""
        if position not in self._sides:
            self._sides[position] = self._cut(position)
        return self._sides[position]

    @cached_property
    def _reach(self) -> list[tuple[fx.Node, int, int, int]]:
        """Each solid operator with its bytes and two numbers: at a position above the first all of its readers are
        near, at one not above the second a reader is far.
        """
        first, last = self._range
        end = len(self.anchors)
        reaches = []
        for node, readers in self.readers.items():
            near = max((end if r is None else first[r] for r in readers), default=-1)
            far = max((end if r is None else last[r] for r in readers), default=-1)
            reaches.append((node, size_of(node), near, far))
        return reaches

    def _cut(self, position: int) -> Side:
        first, last = self._range
        near = frozenset(n for n in self.solid if first[n] < position)
        loose = {n: None for n in self.solid if first[n] >= position > last[n]}  # on either side
        network, scale = nx.DiGraph(), len(loose) + 1
        network.add_nodes_from(["near", "far"])
        crossing = 0  # bytes that cross on whichever side the loose operators are
        for node, size, reach_near, reach_far in self._reach:
            if node in near and position <= reach_far:
                crossing += size
            elif node in loose or (node in near and position <= reach_near):
                far_copy = ("there", node)  # on the far side if the value is sent
                single = isinstance(value(node), torch.Tensor)
                network.add_edge(
                    node if node in loose else "near", far_copy, **({"capacity": size * scale} if single else {})
                )
                for reader in self.readers[node]:
                    if reader in loose:
                        network.add_edge(far_copy, reader)
                    elif reader not in near:
                        network.add_edge(far_copy, "far")
        before = set(self.nodes[: self.nodes.index(self.anchors[position].node)])
        for node in loose:
            for reader in self.readers[node]:
                if reader in loose:
                    network.add_edge(reader, node)
            ends = (
                ("near", node) if node in before else (node, "far")
            )  # (if all else is equal, operators keep the graph's order)
            network.add_edge(*ends, capacity=1)
        for nodes in self._together:
            for a, b in itertools.pairwise(nodes if nodes[0] in loose else ()):
                network.add_edge(a, b)
                network.add_edge(b, a)
        cost, (near_side, _) = nx.minimum_cut(network, "near", "far")
        return Side(near | {n for n in loose if n in near_side}, crossing + int(cost) // scale)

    def assign(self, positions: Iterable[int]) -> dict[fx.Node, int]:
        """Return the stage of each operator of the forward for cuts at these positions, never smaller than that of an
        operand.

        An operator that is not solid has the first stage that reads it, or else that of the base that it is a view of.
        """
        cuts = sorted(positions)
        stages = dict.fromkeys(self.solid, len(cuts))
        for number, position in reversed(list(enumerate(cuts))):
            stages.update(dict.fromkeys(self.near(position).near, number))
        for node in reversed(self.nodes):
            if node not in stages:
                stages[node] = min((stages[u] for u in node.users if u in stages), default=stages.get(carrier(node), 0))
        return {n: stages[n] for n in self.nodes}


def received(line: AnchorChain, stages: Mapping[fx.Node, int]) -> dict[int, list[fx.Node]]:
    """Return, by stage, the values of earlier stages that its forward reads, each once; `stages` are those of the
    forward (`AnchorChain.assign`).

    The last stage also receives all outputs of the program. A value comes directly from the stage that makes it.
    """
    last = max(stages.values(), default=0)
    values_by_stage: dict[int, list[fx.Node]] = defaultdict(list)
    for node, readers in line.readers.items():
        for stage in {last if r is None else stages[r] for r in readers} - {stages[node]}:
            values_by_stage[stage].append(node)
    return dict(sorted(values_by_stage.items()))

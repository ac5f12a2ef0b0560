"""Decides how each node of a captured program is computed when ranks divide it: the placements of its operands and
results.

A node is computed in the way that sends the fewest bytes; of equals, in the one that computes least. `sharding_rules`
gives the ways of an operator itself; `divided_indexing` those by other operators. The graph is read in order and stays
as it is, but for operators that can be divided only as several others (`EXPANSIONS`), which these others replace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from zgraph.errors import PassError
from zgraph.passes.analysis.axes import Axis
from zgraph.passes.analysis.decompositions import EXPANSIONS, expand
from zgraph.passes.spmd.divided_indexing import INDEXED, LEADS, LOOK_UP, Build, build_dropout
from zgraph.passes.spmd.placements import REPLICATE, Partial, Placement, Placements, Replicate, Shard, bytes_of
from zgraph.passes.spmd.sharding_rules import Label, Rule, argument, getitem_of, operands_of
from zgraph.program import collectives
from zgraph.program.aliases import is_view
from zgraph.program.node import tensors
from zgraph.program.program import Division, InputRole, OutputRole

aten = torch.ops.aten

WEIGHT_FACTOR = 1000.0  # how many times more a byte of a weight costs to move than one of an activation

# Operators that pass a gradient on unchanged, or as one of several terms.
_PASSED_ON = {
    aten.clone.default,
    aten._to_copy.default,
    aten.add.Tensor,
    torch.ops.prims.convert_element_type.default,
}


@dataclass(frozen=True)
class Strategy:
    """One way to compute a node."""

    operands: tuple[Placement, ...]  # the placements in which it needs its operands
    results: tuple[Placement, ...]  # the placements that its results have then
    build: Build | None = None  # builds it from a rank's parts of other operators; None: the operator itself


FindWay = Callable[[Placements, fx.Node], Strategy | None]
"""Returns the way that replaces those of a node's rule; None if the rule's ways stay."""


@dataclass(frozen=True)
class Goal:
    """What is to be divided, besides what follows from the division of weights."""

    sequence: bool = False  # whether sums over ranks may leave their result sharded
    # axes along which values that depend on weights are divided even if no operand is, and rather than along others
    along: frozenset[Axis] = frozenset()
    batch: frozenset[Axis] = frozenset()  # the axes of the rows of inputs, which are not divided
    ways: Mapping[object, FindWay] = field(default_factory=dict)  # by operator: finds a way that its rule does not give


@dataclass(frozen=True)
class PlacementChoices:
    """How each node is computed. The placements of the values are in `Placements`."""

    own: Mapping[fx.Node, Shard]  # the parameters that ranks have parts of
    ways: Mapping[fx.Node, Strategy]  # how each operator is computed


def choose_placements(placements: Placements, goal: Goal) -> PlacementChoices:
    """Decide for a whole program; `placements` then has that of each value.

    Raises `PassError` for a parameter that can't be divided as its layout says.
    """
    return _Decider(placements, goal).decide()


def _divided_parameters(placements: Placements) -> dict[fx.Node, Shard]:
    """Return the parameters whose layouts say that these ranks divide them."""
    shards = {}
    for name, node in placements.program.input_nodes(InputRole.PARAMETER).items():
        division = placements.program.params[name].division
        if division is not None and division.mesh_dim == placements.dim:
            shards[node] = Shard(_axis_of(placements, name, node, division), division.dim)
    return shards


def _axis_of(placements: Placements, name: str, node: fx.Node, division: Division) -> Axis:
    outer, axes = 1, placements.axes
    for axis in axes.shape(node)[division.dim]:
        if outer == division.blocks and placements.divides(axis):
            return axis
        outer *= axes.size(axis)
    raise PassError(
        f"parameter {name!r} can't be divided into {placements.ranks} parts along dimension {division.dim}",
        why=f"it is made of {' x '.join(str(axes.size(a)) for a in axes.shape(node)[division.dim]) or '1'}",
    )


def _drops(node: fx.Node) -> bool:
    """Return whether this is a dropout that leaves some values in."""
    return node.target is aten.native_dropout.default and argument(node, 1) < 1 and argument(node, 2) is not False


def _in_what(placement: Placement) -> object:
    """Return the axis of a shard, which views have in other dimensions; else the placement."""
    return placement.axis if isinstance(placement, Shard) else placement


def ways_along(placements: Placements, node: fx.Node, axis: Axis) -> list[Strategy]:
    """Return the ways to compute a node in parts along an axis: one for each label of its rule that covers the axis."""
    rule = placements.axes.rules[node]
    labels = [x for x in rule.sizes if axis in placements.axes.under(node, rule, x)]
    candidates = (_way_along(placements, node, axis, label) for label in labels)
    return [way for way in candidates if way is not None]


def _way_along(placements: Placements, node: fx.Node, axis: Axis, label: Label) -> Strategy | None:
    rule = placements.axes.rules[node]
    if label in rule.whole:
        return _indexed(placements, node, axis) if label == "rows" else None
    operands = _operands_along(placements, node, axis, label)
    if operands is None:
        return None
    parted = any(isinstance(s, Shard) for i, s in enumerate(operands) if i not in rule.unread)
    results: list[Placement] = []
    for i, (shape, dims) in enumerate(zip(placements.axes.shapes(node), rule.results, strict=True)):
        here = next((d for d, dim in enumerate(dims) if label in dim), None)
        if here is None:
            results.append(Partial(rule.reduction) if parted and i not in rule.alike else REPLICATE)
            continue
        if shape[here].count(axis) != 1:
            return None
        results.append(Shard(axis, here))
    return Strategy(tuple(operands), tuple(results))


def _operands_along(placements: Placements, node: fx.Node, axis: Axis, label: Label) -> list[Placement] | None:
    """Return the placements in which the operands are needed for results in parts along a label; None where one can't
    have its own.
    """
    rule = placements.axes.rules[node]
    given: list[Placement] = []
    for i, (operand, dims) in enumerate(zip(operands_of(node), rule.operands, strict=True)):
        here = next((d for d, dim in enumerate(dims) if label in dim), None)
        if i in rule.unread:
            placement = placements.of(operand)
            if any(dims) and (here is None or placement != Shard(axis, here)):
                return None  # (its shape is that of the result)
            given.append(placement)
            continue
        if here is not None and placements.axes.shape(operand)[here].count(axis) != 1:
            return None
        given.append(REPLICATE if here is None else Shard(axis, here))
    return given


def _indexed(placements: Placements, node: fx.Node, axis: Axis) -> Strategy | None:
    """Return the way to look up, or to put, only what is in a rank's part of the indexed dimension; None if there is
    none.
    """
    if node.target not in INDEXED or axis in placements.folded:
        return None  # (a rank's part of a folded axis is no range of indices)
    axes, operands = placements.axes, operands_of(node)
    lead = LEADS.get(node.target)
    at = 0 if lead is None else argument(node, lead) % len(axes.shapes(node)[0])
    read, others = Shard(axis, at), (REPLICATE,) * (len(operands) - 1)
    table = node if node.target not in LOOK_UP else operands[0]
    if axes.shapes(table)[0][at][:1] != (axis,):
        return None
    if node.target in LOOK_UP:
        return Strategy((read, *others), (Partial("sum"),), INDEXED[node.target])
    first: Placement = REPLICATE if node.target is aten.embedding_dense_backward.default else read
    return Strategy((first, *others), (read,), INDEXED[node.target])


class _Decider:
    def __init__(self, placements: Placements, goal: Goal) -> None:
        self.placements, self.goal = placements, goal
        self.program, self.axes, self.ranks = placements.program, placements.axes, placements.ranks
        self.own = _divided_parameters(placements)
        self.ways: dict[fx.Node, Strategy] = {}
        self.trained: set[fx.Node] = set()  # parameters, and values that depend on them
        self.weights: set[fx.Node] = set()  # divided parameters, and views of them
        self.wanted: dict[
            fx.Node, Placement
        ] = {}  # placements that gradients, and values passed on to them, should have
        self._paid: set[tuple[fx.Node, object]] = set()  # values converted already (one conversion serves all readers)

    def decide(self) -> PlacementChoices:
        self._want()
        parameters = set(self.program.input_nodes(InputRole.PARAMETER).values())
        node = next(iter(self.program.graph.nodes))
        while node.op != "output":
            following = node.next
            if not self.trained.isdisjoint(node.all_input_nodes):
                self.trained.add(node)
            if node.op == "placeholder":
                self.placements.of_results[node] = [self.own.get(node, REPLICATE)]
                if node in self.own:
                    self.weights.add(node)
                if node in parameters:
                    self.trained.add(node)
            elif (at := getitem_of(node)) is not None:
                self.placements.of_results[node] = [self.placements.of_results[node.args[0]][at]]  # type: ignore[index]
            elif (first := self._expanded(node)) is not None:
                following = first
            else:
                self.ways[node] = way = self._way(node)
                self.placements.of_results[node] = list(way.results)
                for operand, target in zip(operands_of(node), way.operands, strict=True):
                    self._paid.add((self.placements.origin(operand), _in_what(target)))
                    if operand in self.weights and is_view(node):
                        self.weights.add(node)
            node = following
        return PlacementChoices(self.own, self.ways)

    def _want(self) -> None:
        """Note the placements that gradients, and values that are passed on to them, should have."""
        by_name = {p.name: n for p, n in self.program.input_items() if p.role is InputRole.PARAMETER}
        for port, node in self.program.output_items():
            if port.role is OutputRole.GRADIENT and port.of is InputRole.PARAMETER and port.name in by_name:
                state = self.own.get(by_name[port.name], REPLICATE)
                stack = [node]
                while stack:
                    at = stack.pop()
                    if at in self.wanted or at.op != "call_function":
                        continue
                    self.wanted[at] = state
                    if is_view(at) or at.target in _PASSED_ON:
                        stack += at.all_input_nodes

    def _expanded(self, node: fx.Node) -> fx.Node | None:
        """Return the first of the nodes that replace one that can be divided only as several others; None if it stays."""
        expansion = EXPANSIONS.get(node.target)
        rule = self.axes.rules.get(node)
        if expansion is None or rule is None:
            return None
        states = [self.placements.of(o) for o in operands_of(node)]
        needed = any(
            isinstance(state, Shard) and x in rule.whole and state.axis in self.axes.under(node, rule, x)
            for state, dims in zip(states, rule.operands, strict=True)
            for x in (dims[state.dim] if isinstance(state, Shard) else ())
        )
        if not needed:
            return None
        before = node.prev
        expanded = expand(self.program, node, expansion, self.placements.note, self._stand_for)
        return before.next if expanded else None

    def _stand_for(self, node: fx.Node, old: fx.Node) -> None:
        self.axes.merge(node, old)
        if old in self.wanted:
            self.wanted[node] = self.wanted[old]

    def _way(self, node: fx.Node) -> Strategy:
        operands = operands_of(node)
        if collectives.is_wait(node):
            # Between a start over other ranks and its wait nothing can be done with the value.
            state = self.placements.of(operands[0])
            return Strategy((state,), (state,))
        rule = self.axes.rules.get(node)
        whole = Strategy(self._whole(rule, operands), (REPLICATE,) * len(self.axes.shapes(node)))
        ways = [whole] if rule is None else [*self._ways(node, rule, operands), whole]
        if _drops(node) and isinstance(state := self.placements.of(operands[0]), Shard):
            ways.insert(0, Strategy((state,), (state, state), build_dropout))
        if node in self.wanted:
            # Gradients of weights are sums over a sequence, however short it is: else all of it would be on each rank.
            sums = [w for w in ways if any(isinstance(s, Shard) and s.axis in self.goal.along for s in w.operands)]
            ways = sums or ways
        return min(ways, key=lambda w: self._cost(node, operands, w))

    def _whole(self, rule: Rule | None, operands: Sequence[fx.Node]) -> tuple[Placement, ...]:
        """Return the placements of operands for whole results: whole, except operands of which at most the shape is
        read.
        """
        states = [self.placements.of(o) for o in operands]
        is_kept = [
            rule is not None and i in rule.unread and (isinstance(s, Partial) or not any(rule.operands[i]))
            for i, s in enumerate(states)
        ]
        return tuple(s if k else REPLICATE for s, k in zip(states, is_kept, strict=True))

    def _ways(self, node: fx.Node, rule: Rule, operands: Sequence[fx.Node]) -> list[Strategy]:
        find = self.goal.ways.get(node.target)
        if find is not None and (own := find(self.placements, node)) is not None:
            return [own]
        states = [self.placements.of(o) for o in operands]
        ways: list[Strategy] = []
        linear = [states[i] for i in rule.linear]
        if linear and all(isinstance(s, Partial) and s.reduce_op == "sum" for s in linear):
            operand_placements = tuple(Partial("sum") if i in rule.linear else REPLICATE for i in range(len(operands)))
            ways.append(Strategy(operand_placements, (Partial("sum"),) * len(rule.results)))
        candidates = {s.axis: None for s in states if isinstance(s, Shard)}
        wish = self.wanted.get(node)
        if isinstance(wish, Shard):
            candidates[wish.axis] = None
        if self.goal.sequence:
            for operand, state in zip(operands, states, strict=True):
                shape = self.axes.shape(operand)
                if isinstance(state, Partial) and shape[:-1] and shape[-1]:  # (not for statistics of rows: too small)
                    candidates |= {a: None for dim in shape[:-1] for a in dim if self.placements.divides(a)}
        if node in self.trained:
            candidates |= dict.fromkeys(self.goal.along)
        for axis in candidates:
            ways += ways_along(self.placements, node, axis)
        parted = any(isinstance(s, Shard) for s in states)
        free = self.goal.along and parted and node not in self.wanted
        if free and all(self._cost(node, operands, w)[0] for w in ways):
            # Where a node can't be divided along the sequence (as attention), it may be along another axis.
            every = {a: None for x in rule.sizes for a in self.axes.under(node, rule, x) if self.placements.divides(a)}
            for axis in every:
                if axis not in candidates and axis not in self.goal.batch:
                    ways += ways_along(self.placements, node, axis)
        return ways

    def _cost(self, node: fx.Node, operands: Sequence[fx.Node], way: Strategy) -> tuple[float, int]:
        """Return the bytes that a rank sends, and, to choose among equals, the number of results that it computes
        whole.
        """
        total = 0.0
        for operand, state in {(o, s): None for o, s in zip(operands, way.operands, strict=True)}:
            weight = WEIGHT_FACTOR if operand in self.weights else 1.0
            total += weight * self._moved(operand, self.placements.of(operand), state)
        if node in self.wanted and len(way.results) == 1:
            total += self._moved(node, way.results[0], self.wanted[node])
        elif self.goal.along:
            # A sum over ranks costs its conversion to parts of the sequence, unless an operand is such a sum already.
            spread = [i for i, s in enumerate(way.results) if isinstance(s, Partial)]
            if not any(isinstance(s, Partial) for s in way.operands):
                results = list(tensors(node))
                total += sum(bytes_of(results[i]) for i in spread if self._runs_along(node, i))
        return total, sum(isinstance(s, (Replicate, Partial)) for s in way.results)

    def _runs_along(self, node: fx.Node, at: int) -> bool:
        return any(axis in self.goal.along for dim in self.axes.shapes(node)[at] for axis in dim)

    def _moved(self, node: fx.Node, state: Placement, target: Placement) -> float:
        """Return the bytes that a rank sends to convert a value to another placement."""
        if state == target or isinstance(state, Replicate):
            return 0.0
        sent = self.placements.origin(node) if node in self.placements.of_results else node
        if (sent, _in_what(target)) in self._paid:
            return 0.0
        nbytes = sum(bytes_of(t) for t in tensors(node))
        if isinstance(state, Partial):
            return nbytes * (1 if isinstance(target, Shard) else 2)
        return nbytes / self.ranks if isinstance(target, Shard) else nbytes

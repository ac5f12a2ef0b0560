"""Equal layers of a captured forward, of which AOTAutograd needs to see only a few.

AOTAutograd takes most of a capture, and takes as long for the twentieth equal layer as for the first. Here runs of
equal layers are found in dynamo's graph and shortened to five, which are traced; `repeated_layers` then repeats the
third of them in the joint graph as often as it was left out.

    layer    the calls of one entry of a list of modules, with what is computed between the entry before and it
    unit     one layer, or as many as a pattern of layers has (a model may alternate between two kinds)
    run      successive units with equal calls: the same operators, arguments and types, which read themselves, the
             unit before, inputs of their own (their parameters) and what all units read

A unit has equal calls only if nothing but the unit itself and the next one reads what it computes, so a model that
returns what each layer gave, or that skips from one to another, is traced whole.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zgraph.names import layer_path
from zgraph.program.node import module_of
from zgraph.torch_compat import fake_tensors, fx_graphs

# The units that are traced: the first three and the last two. The third is what is repeated. What it computes, in
# either direction, has units on both sides that are neither the first nor the last of the run.
FIRST, LAST = 3, 2
MIN_FEWER = 60  # calls that need not be traced: about half a second (benchmarks/compile_time.py)
_PATTERNS = range(1, 7)  # layers in a unit
_SMALL = 16  # elements of a constant that are compared
_DEPTHS = (1, 2)  # layers may be in layers, as in T5's blocks; the outer ones are tried first


@dataclass(frozen=True, eq=False)
class Unit:
    """A unit of a run."""

    calls: tuple[fx.Node, ...]  # its calls, in order
    own: tuple[int, ...]  # positions among the graph's inputs of those that it alone reads, in the order of first use
    layers: frozenset[str]  # the paths of its layers
    stacks: tuple[Any, ...]  # what dynamo noted of the modules around each of its calls, and of those within


@dataclass(frozen=True, eq=False)
class Run:
    """Successive equal units of a graph."""

    units: tuple[Unit, ...]  # in the order in which they run
    depth: int  # how many numbers the path of a layer has

    @property
    def kept(self) -> tuple[Unit, ...]:
        """The units that are traced."""
        return (*self.units[:FIRST], *self.units[-LAST:])

    @property
    def left_out(self) -> tuple[Unit, ...]:
        """The units that are not traced."""
        return self.units[FIRST:-LAST]


@dataclass(frozen=True, eq=False)
class Shortened:
    """A graph without the units that a run leaves out."""

    run: Run  # of the whole graph
    module: fx.GraphModule  # the graph without them
    inputs: tuple[int, ...]  # the position that each of its inputs has in the whole graph
    whole_inputs: int  # how many inputs the whole graph has


def shortened(module: fx.GraphModule) -> list[Shortened]:
    """Return a forward of dynamo's with fewer layers, one run shortened in each step; an empty list where none is long enough.

    Sizes must be numbers.
    """
    steps: list[Shortened] = []
    while (run := _longest_run(module)) is not None:
        steps.append(_without(module, run))
        module = steps[-1].module
    return steps


def _longest_run(module: fx.GraphModule) -> Run | None:
    """Return the run of a graph that leaves out the most calls."""
    for depth in _DEPTHS:
        layers = _layers(module, depth)
        best, most = None, MIN_FEWER - 1
        for pattern in _PATTERNS:
            for units in _candidates(layers, pattern):
                for run in _runs(module, units, depth):
                    fewer = sum(len(unit.calls) for unit in run.left_out)
                    if fewer > most:
                        best, most = run, fewer
            if best is not None and most > sum(map(len, layers)) / 3:  # (a longer pattern finds no better one)
                break
        if best is not None:
            return best
    return None


def _candidates(layers: Sequence[list[fx.Node]], pattern: int) -> Iterator[list[list[fx.Node]]]:
    """Yield lists of successive units of `pattern` layers that are equal by their operators."""
    kinds = [[(node.op, None if node.op == "get_attr" else node.target) for node in calls] for calls in layers]
    at = 0
    while at + pattern < len(layers):
        end = at + pattern
        while end < len(layers) and kinds[end] == kinds[end - pattern]:
            end += 1
        if (end - at) // pattern > FIRST + LAST:
            groups = [layers[i : i + pattern] for i in range(at, end - pattern + 1, pattern)]
            before = [layers[max(at - pattern, 0) : at]] if at else []  # (which the first equal unit may read)
            yield [[node for calls in group for node in calls] for group in (*before, *groups)]
        at = max(end - pattern + 1, at + 1)


def _layers(module: fx.GraphModule, depth: int) -> list[list[fx.Node]]:
    """Return the calls of each layer, in order; none where forward comes back to a layer that it has left."""
    layers: dict[str, list[fx.Node]] = {}
    between: list[fx.Node] = []
    current = None
    for node in _calls(module.graph):
        path = next((p for n in _within(module, node) if (p := layer_path(module_of(n.meta), depth)) is not None), None)
        if path is None:
            between.append(node)
            continue
        if path != current and path in layers:
            return []
        layers.setdefault(path, []).extend([*between, node])
        between, current = [], path
    return list(layers.values())


def _runs(module: fx.GraphModule, units: Sequence[list[fx.Node]], depth: int) -> Iterator[Run]:
    """Yield the runs of these successive units."""
    keys = _Keys(module, units)
    at = 0
    while at < len(units):
        end = at + 1
        if keys[at] is not None:
            while end < len(units) and keys[end] == keys[at] and not keys.leaks(end - 1):
                end += 1
            if end - at > FIRST + LAST:
                yield Run(tuple(_unit(module, units[i], keys.own(i), depth) for i in range(at, end)), depth)
        at = end


def _unit(module: fx.GraphModule, calls: list[fx.Node], own: tuple[int, ...], depth: int) -> Unit:
    every = [node for call in calls for node in _within(module, call)]
    paths = {layer_path(module_of(node.meta), depth) for node in every}
    stacks = tuple(node.meta.get("nn_module_stack") for node in every)
    return Unit(tuple(calls), own, frozenset(p for p in paths if p is not None), stacks)


class Unequal(Exception):
    """Something that is never the same in two units."""


class _Keys:
    """Keys that are equal for equal units; None for a unit with something that never equals another's."""

    def __init__(self, module: fx.GraphModule, units: Sequence[list[fx.Node]]) -> None:
        graph = module.graph
        self._module, self._units = module, units
        self._places = {node: (u, at) for u, calls in enumerate(units) for at, node in enumerate(calls)}
        self._inputs = {node: at for at, node in enumerate(graph.find_nodes(op="placeholder"))}
        self._own: dict[int, dict[fx.Node, int]] = defaultdict(dict)
        self._keys = [self._key(u) for u in range(len(units))]

    def __getitem__(self, unit: int) -> Any:
        return self._keys[unit]

    def own(self, unit: int) -> tuple[int, ...]:
        """Return the positions of the inputs that a unit alone reads."""
        return tuple(self._inputs[node] for node in self._own[unit])

    def leaks(self, unit: int) -> bool:
        """Return whether anything but a unit and the next one reads what the unit computes."""
        readers = (self._places.get(user, (None, 0))[0] for node in self._units[unit] for user in node.users)
        return any(reader not in (unit, unit + 1) for reader in readers)

    def _key(self, unit: int) -> list[Any] | None:
        try:
            return [self._of_call(node, unit) for node in self._units[unit]]
        except Unequal:
            return None

    def _of_call(self, node: fx.Node, unit: int) -> Any:
        target = attribute_key(self._module, str(node.target)) if node.op == "get_attr" else node.target
        arguments = structure((node.args, node.kwargs), lambda argument: self.reference(argument, unit))
        return (node.op, target, arguments, recorded_type(node))

    def reference(self, node: fx.Node, unit: int) -> Any:
        """Return what an argument is to a unit."""
        if node in self._inputs:
            if any(self._places.get(user, (None, 0))[0] != unit for user in node.users):
                return ("input", node.name)
            own = self._own[unit]
            return ("own", own.setdefault(node, len(own)), recorded_type(node))
        of, at = self._places.get(node, (None, 0))
        if of == unit:
            return ("here", at)
        if of == unit - 1 and unit:
            return ("before", at - len(self._units[of]))
        return ("other", node.name)


def _within(module: fx.GraphModule, node: fx.Node) -> Iterator[fx.Node]:
    """Yield a call, and those of the graph that it reads (a region of torch.utils.checkpoint, say)."""
    yield node
    inner = operator.attrgetter(str(node.target))(module) if node.op == "get_attr" else None
    if isinstance(inner, fx.GraphModule):
        for other in _calls(inner.graph):
            yield from _within(inner, other)


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def structure(item: Any, reference: Any) -> Any:
    """Return arguments as a value that equals another's only if all constants have the same type and value.

    `reference` gives what stands for a node.
    """
    if isinstance(item, fx.Node):
        return reference(item)
    if isinstance(item, (tuple, list)):
        return (type(item).__name__, *(structure(x, reference) for x in item))
    if isinstance(item, dict):
        return ("dict", *((k, structure(x, reference)) for k, x in item.items()))
    if isinstance(item, slice):
        return ("slice", *(structure(x, reference) for x in (item.start, item.stop, item.step)))
    if isinstance(item, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise Unequal
    return (type(item), repr(item))


def recorded_type(node: fx.Node) -> Any:
    """Return what is known of the fake value of a node of dynamo's or AOTAutograd's (see `type_of_value`)."""
    return type_of_value(node.meta.get("example_value", node.meta.get("val")))


def attribute_key(module: fx.GraphModule, name: str) -> Any:
    """Return what equals that of another attribute with the same graph, or with the same few elements.

    Raises `Unequal` for any other attribute.
    """
    attribute = operator.attrgetter(name)(module)
    is_small = type(attribute) is torch.Tensor and attribute.numel() <= _SMALL and attribute.layout is torch.strided
    if is_small and not fake_tensors.is_fake(attribute):
        return (attribute.dtype, attribute.device, attribute.shape, attribute.stride(), repr(attribute.tolist()))
    if not isinstance(attribute, fx.GraphModule):
        raise Unequal("a constant")
    places: dict[fx.Node, int] = {}
    rows = []
    for node in attribute.graph.nodes:
        target = attribute_key(attribute, str(node.target)) if node.op == "get_attr" else node.target
        rows.append(
            (
                node.op,
                None if node.op == "placeholder" else target,
                structure((node.args, node.kwargs), places.__getitem__),
                recorded_type(node),
            )
        )
        places[node] = len(places)
    return tuple(rows)


def type_of_value(value: Any) -> Any:
    """Return what is known of a fake value, as a value that can be compared. Raises `Unequal` for symbolic sizes."""
    if isinstance(value, (tuple, list)):
        return tuple(type_of_value(x) for x in value)
    if not isinstance(value, torch.Tensor):
        return structure(value, None)
    if value.layout is not torch.strided or value.is_conj() or value.is_neg():
        raise Unequal
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    if not all(type(n) is int for n in sizes):
        raise Unequal
    return (value.dtype, value.device, value.dim(), sizes, value.requires_grad, type(value))


def _without(module: fx.GraphModule, run: Run) -> Shortened:
    """Return a graph without the units that a run leaves out: the next one reads the third unit in their place."""
    gone: Set[fx.Node] = {node for unit in run.left_out for node in unit.calls}
    inputs = module.graph.find_nodes(op="placeholder")
    gone = gone | {inputs[at] for unit in run.left_out for at in unit.own}
    template, last = run.units[FIRST - 1], run.left_out[-1]
    graph = fx.Graph()
    memo: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node in gone:
            continue
        memo[node] = graph.node_copy(node, lambda n: memo[n])
        memo[node].meta = dict(node.meta)
        if node is template.calls[-1]:
            memo.update({old: memo[new] for old, new in zip(last.calls, template.calls, strict=True)})
    positions = tuple(at for at, node in enumerate(inputs) if node not in gone)
    return Shortened(run, fx_graphs.lazy_module(module, graph), positions, len(inputs))

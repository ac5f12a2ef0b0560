"""The joint graph of a whole forward from that of a shortened one (see `equal_layers`): one unit, repeated.

*Contract.* The result is, but for names, the graph that AOTAutograd makes of the whole forward, or none is made. What
AOTAutograd makes of a unit depends on the unit alone and on what its neighbours make: operators, types and the order in
which autograd runs, not on how many units there are. So where the third unit's calls equal its neighbours' in both
directions, in what they are and in what they read, each unit between the third and the last but one has the same calls.
The equality is checked call by call; where it does not hold, the whole forward is traced.

    block    a unit's calls in the forward, or in the backward: from the first of its own to the first of the next unit's
    place    (half, unit, position) of a call in a block; positions in a forward block count from its end
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from zgraph.capture.equal_layers import FIRST, LAST, Shortened, Unequal, attribute_key, recorded_type, structure
from zgraph.names import layer_path
from zgraph.program.node import module_of
from zgraph.torch_compat import aot, fx_graphs
from zgraph.torch_compat.fake_tensors import view_of
from zgraph.torch_compat.tensor_storage import storage_key

logger = logging.getLogger(__name__)

_KEPT = FIRST + LAST
_TEMPLATE = FIRST - 1  # the unit that is repeated, of those kept
_FORWARD, _BACKWARD = "forward", "backward"
_NUMBERS = ("seq_nr", "ac_graph_id")  # autograd's of the operation, that of the region of torch.utils.checkpoint
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")


class _Place(NamedTuple):
    half: str  # of the step
    unit: int  # of those kept
    at: int  # position in the block; in the forward from its end


def whole(steps: Sequence[Shortened], joint: fx.GraphModule) -> fx.GraphModule | None:
    """Return the joint graph of the whole forward, given that of the last of the steps that shortened it; None where the
    units are not equal in it."""
    for step in reversed(steps):
        try:
            joint = _Repetition(step, joint).graph()
        except Unequal as why:
            logger.debug("the whole forward is traced: %s", why)
            return None
    return joint


class _Repetition:
    """A joint graph of a shortened forward on its way to that of the whole one."""

    def __init__(self, step: Shortened, joint: fx.GraphModule) -> None:
        self.step, self.joint = step, joint
        self.times = len(step.run.left_out)
        self.calls = [n for n in joint.graph.nodes if n.op not in ("placeholder", "output")]
        self.inputs = self._inputs()
        whole_at = {at: i for i, at in enumerate(step.inputs)}
        self.own = {
            self.inputs[whole_at[at]]: (unit, i)
            for unit, kept in enumerate(step.run.kept)
            for i, at in enumerate(kept.own)
        }
        self.place: dict[fx.Node, _Place] = {}
        self.blocks: dict[tuple[str, int], list[fx.Node]] = {}
        self._find_blocks()
        self._compare()
        self._refuse_readers()

    def graph(self) -> fx.GraphModule:
        """Return the joint graph of the whole forward. Raises `Unequal`."""
        return _Build(self).module()

    def _inputs(self) -> list[fx.Node]:
        """Return the placeholders of the flat inputs, which are the first ones."""
        placeholders = self.joint.graph.find_nodes(op="placeholder")
        count = len(self.step.inputs)
        described = [aot.describe_input(node.meta.get("desc")) for node in placeholders]
        if described[:count] != [("input", at) for at in range(count)] or any(
            kind == "input" for kind, _ in described[count:]
        ):
            raise Unequal("its inputs are others than the forward's")
        return placeholders[:count]

    # -- where the blocks are -------------------------------------------------------------------
    def _find_blocks(self) -> None:
        backward = [n.meta.get("partitioner_tag") == "is_backward" for n in self.calls]
        begins = backward.index(True) if True in backward else len(self.calls)
        ordered = range(_KEPT)
        starts = self._starts(self.calls[:begins], 0, ordered)
        if starts is None:
            raise Unequal("nothing of the forward belongs to the layers")
        self._add(_FORWARD, starts, ordered)
        if (starts := self._starts(self.calls[begins:], begins, ordered[::-1])) is not None:
            self._add(_BACKWARD, starts, ordered[::-1])

    def _starts(self, calls: Sequence[fx.Node], offset: int, order: Sequence[int]) -> list[int] | None:
        """Return where the blocks of the units begin, in this order; None where there are no calls of the units."""
        of_layer = {path: unit for unit, kept in enumerate(self.step.run.kept) for path in kept.layers}
        first: dict[int, int] = {}
        for at, node in enumerate(calls):
            path = layer_path(module_of(node.meta), self.step.run.depth)
            if path in of_layer:
                first.setdefault(of_layer[path], offset + at)
        if not first:
            return None
        if list(first) != list(order):
            raise Unequal("its layers run in another order than the forward's")
        return list(first.values())

    def _add(self, half: str, starts: Sequence[int], order: Sequence[int]) -> None:
        for unit, begin, end in zip(order, starts, starts[1:], strict=False):
            block = self.calls[begin:end]
            self.blocks[half, unit] = block
            base = len(block) if half == _FORWARD else 0
            self.place.update({node: _Place(half, unit, at - base) for at, node in enumerate(block)})

    # -- whether they are equal -----------------------------------------------------------------
    def _compare(self) -> None:
        pairs = [(_FORWARD, _TEMPLATE, _TEMPLATE - 1), (_FORWARD, _TEMPLATE, _TEMPLATE + 1)]
        if (_BACKWARD, _TEMPLATE) in self.blocks:
            pairs.append((_BACKWARD, _TEMPLATE, _TEMPLATE - 1))
        for half, one, other in pairs:
            keys = [[self._key(node, unit) for node in self.blocks[half, unit]] for unit in (one, other)]
            if keys[0] != keys[1]:
                raise Unequal(f"its {half} differs from one layer to the next")

    def _key(self, node: fx.Node, unit: int) -> Any:
        def reference(argument: fx.Node) -> Any:
            return self.relative(argument, unit)

        kept = tuple(node.meta.get(k) for k in ("partitioner_tag", "autograd_backward", "is_gradient_acc", "recompute"))
        arguments = structure(node.args, reference), structure(node.kwargs, reference)
        target = attribute_key(self.joint, str(node.target)) if node.op == "get_attr" else node.target
        return (node.op, target, *arguments, recorded_type(node), kept, self._aliases(node, unit))

    def relative(self, node: fx.Node, unit: int) -> Any:
        """Return what a value is to a unit: the same for equal units. Raises `Unequal` for one of a unit that is no
        neighbour."""
        if node in self.own:
            of, at = self.own[node]
            half = "input"
        elif node in self.place:
            half, of, at = self.place[node]
        else:
            return ("other", node.name)
        if abs(of - unit) > 1:
            raise Unequal("a layer reads what one far from it has")
        return (half, of - unit, at)

    def _aliases(self, node: fx.Node, unit: int) -> Any:
        """Return which arguments' memory a call's results are in."""
        return tuple(
            tuple(self.relative(a, unit) for a in node.all_input_nodes if _shares(value, a)) for value in _tensors(node)
        )

    def _refuse_readers(self) -> None:
        """Raise `Unequal` where anything but itself and its neighbours reads what the template computes."""
        for half in (_FORWARD, _BACKWARD):
            for node in self.blocks.get((half, _TEMPLATE), ()):
                for user in node.users:
                    place = self.place.get(user)
                    if user.op != "output" and (place is None or abs(place.unit - _TEMPLATE) > 1):
                        raise Unequal("what a layer computes is read far from it")


class _Build:
    """Builds the whole joint graph of a repetition.

    The units between the template and the next kept one are numbered: 0 is the template, `times` the last that was left
    out, `times + 1` the next kept unit.
    """

    def __init__(self, repetition: _Repetition) -> None:
        self.of = repetition
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}  # of the nodes that are there once
        self.repeated: dict[tuple[Any, int], fx.Node] = {}  # of the template's: by (its place or input, unit)
        self.counts = {key: self._count(key) for key in _NUMBERS}

    def module(self) -> fx.GraphModule:
        """Return the graph."""
        self._inputs()
        of, times = self.of, self.of.times
        for node in of.calls:
            place = of.place.get(node)
            if place is None or place.unit != _TEMPLATE:
                self._once(node)
                continue
            block = of.blocks[place.half, _TEMPLATE]
            if node is not block[0]:
                continue
            for unit in range(times + 1) if place.half == _FORWARD else range(times, -1, -1):
                for template in block:
                    self._repeat(template, unit)
        self._output()
        return fx_graphs.lazy_module(of.joint, self.graph)

    # -- inputs and outputs ---------------------------------------------------------------------
    def _inputs(self) -> None:
        of, step = self.of, self.of.step
        traced = dict(zip(step.inputs, of.inputs, strict=True))
        left_out = {at: (unit, i) for unit, x in enumerate(step.run.left_out, 1) for i, at in enumerate(x.own)}
        template = [traced[at] for at in step.run.kept[_TEMPLATE].own]
        for at in range(step.whole_inputs):
            if at in traced:
                node = self._once(traced[at])
                if traced[at] in template:
                    self.repeated[("input", template.index(traced[at])), 0] = node
            else:
                unit, i = left_out[at]
                node = self.graph.placeholder(f"primals_{at + 1}")
                node.meta = {**template[i].meta, "val": _twin(template[i], {})}
                self.repeated[("input", i), unit] = node
            node.meta["desc"] = aot.with_inputs(traced.get(at, of.inputs[0]).meta["desc"], _always(at))
        for node in of.joint.graph.find_nodes(op="placeholder")[len(of.inputs) :]:
            self._once(node)
            self.new[node].meta["desc"] = aot.with_inputs(node.meta.get("desc"), step.inputs.__getitem__)

    def _output(self) -> None:
        """Return what the whole forward changes of its inputs, what it gives, and its gradients, as AOTAutograd orders
        them."""
        of = self.of
        output = of.joint.graph.output_node()
        given: list[tuple[fx.Node, Any]] = []
        of_inputs: dict[str, dict[int, tuple[fx.Node, Any]]] = {"mutation": {}, "gradient": {}}
        for value, desc in zip(output.args[0], output.meta["desc"], strict=True):  # type: ignore[arg-type]
            if not isinstance(value, fx.Node):
                continue
            kind, at = aot.describe_output(desc)
            if kind in of_inputs:
                of_inputs[kind][at] = (value, desc)
            elif kind != "output" or self._in_template(value):
                raise Unequal("what a layer computes is returned")
            else:
                given.append((self.new[value], aot.with_inputs(desc, of.step.inputs.__getitem__)))
        every = [*self._of_inputs(of_inputs["mutation"]), *given, *self._of_inputs(of_inputs["gradient"])]
        values = [value for value, _ in every]
        new = self.graph.output(tuple(values) if isinstance(output.args[0], tuple) else values)
        new.meta = {**output.meta, "desc": [desc for _, desc in every]}

    def _of_inputs(self, results: dict[int, tuple[fx.Node, Any]]) -> list[tuple[fx.Node, Any]]:
        """Return results for inputs of the whole forward (gradients, or new values), given those of the shortened one by
        its inputs."""
        of, step = self.of, self.of.step
        whole: dict[int, tuple[fx.Node, Any]] = {}
        for at, (value, desc) in results.items():
            unit, i = of.own.get(of.inputs[at], (None, 0))
            if unit != _TEMPLATE:
                whole[step.inputs[at]] = (self._beside(value, unit), desc)
                continue
            self._compare_results(i, value, results)
            for number, repeated in enumerate((step.run.kept[unit], *step.run.left_out)):
                whole[repeated.own[i]] = (self._argument(value, number), desc)
        return [(whole[at][0], aot.with_inputs(whole[at][1], _always(at))) for at in sorted(whole)]

    def _compare_results(self, i: int, value: fx.Node, results: dict[int, tuple[fx.Node, Any]]) -> None:
        """Raise `Unequal` unless the result for this input of the template's is to it what that of a neighbour is to
        that. (Where blocks are behind what they are named for, only one neighbour has it in a block.)"""
        of = self.of
        beside = {
            unit: next(at for at, n in enumerate(of.inputs) if of.own.get(n) == (unit, i))
            for unit in (_TEMPLATE - 1, _TEMPLATE + 1)
        }
        if not results.keys() >= set(beside.values()):
            raise Unequal("some layers have a result that others have not")
        mine = of.relative(value, _TEMPLATE)
        theirs = [of.relative(results[at][0], unit) for unit, at in beside.items()]
        if mine[0] == "other" or mine not in theirs:
            raise Unequal("results differ from one layer to the next")

    def _beside(self, value: fx.Node, unit: int | None) -> fx.Node:
        """Return the result for an input that is not the template's."""
        if not self._in_template(value):
            return self.new[value]
        if unit is None or abs(unit - _TEMPLATE) > 1:
            raise Unequal("a result is what a layer computes")
        return self._argument(value, self.of.times + 1 if unit > _TEMPLATE else -1)

    # -- calls ----------------------------------------------------------------------------------
    def _once(self, node: fx.Node) -> fx.Node:
        place = self.of.place.get(node)
        number = self.of.times + 1 if place is not None and place.unit == _TEMPLATE + 1 else -1
        new = self.new[node] = self._copy(node, number)
        self._renumber(new, number)
        return new

    def _repeat(self, node: fx.Node, number: int) -> None:
        new = self.repeated[self._name(node), number] = self._copy(node, number)
        self._renumber(new, number)
        for key in _STACKS if number else ():
            if new.meta.get(key):
                new.meta[key] = self._stack(new.meta[key], number)

    def _copy(self, node: fx.Node, number: int) -> fx.Node:
        """Copy a call for a unit; with a value of its own where it is a repeated one, or is in such a one's memory."""
        arguments = {a: self._argument(a, number) for a in node.all_input_nodes}
        new = self.graph.node_copy(node, arguments.__getitem__)
        new.meta = dict(node.meta)
        other = [a for a, b in arguments.items() if a.meta.get("val") is not b.meta.get("val")]
        if 0 < number <= self.of.times or any(_shares(x, a) for a in other for x in _tensors(node)):
            new.meta["val"] = _twin(node, arguments)
        return new

    def _argument(self, node: fx.Node, number: int) -> fx.Node:
        """Return what stands for an argument of a call of this unit (by its number; -1 for any that is not next to a
        repeated one)."""
        of = self.of
        unit = of.own[node][0] if node in of.own else of.place[node].unit if node in of.place else None
        if unit is None or (unit != _TEMPLATE and not 0 <= number <= of.times):
            return self.new[node]
        if not 0 <= number <= of.times:  # (a kept neighbour's, which reads the template's)
            return self.repeated[self._name(node), of.times if number > of.times else 0]
        to = number + unit - _TEMPLATE
        if 0 <= to <= of.times:
            return self.repeated[self._name(node), to]
        return self.new[node]

    def _name(self, node: fx.Node) -> Any:
        """Return what a node of the template, or one like it in a neighbour, is called in `repeated`."""
        if node in self.of.own:
            return ("input", self.of.own[node][1])
        half, _, at = self.of.place[node]
        return (half, at)

    def _in_template(self, node: fx.Node) -> bool:
        return node in self.of.place and self.of.place[node].unit == _TEMPLATE

    # -- what nodes carry -----------------------------------------------------------------------
    def _stack(self, stack: dict[str, Any], number: int) -> dict[str, Any]:
        """Return the modules around a call of the template as they are around the same call of another unit."""
        run = self.of.step.run
        wanted = _signature(stack)
        for at, own in enumerate(run.kept[_TEMPLATE].stacks):
            if own and _signature(own) == wanted:
                return run.left_out[number - 1].stacks[at]
        if layer_path(module_of({"nn_module_stack": stack}), run.depth) is not None:
            raise Unequal("a call is in a module that no call of the forward is in")
        return stack

    def _count(self, key: str) -> tuple[int, int]:
        """Return (the last number of the template's forward, how many numbers a unit's forward has)."""
        blocks = [self.of.blocks[_FORWARD, unit] for unit in (_TEMPLATE - 1, _TEMPLATE)]
        before, last = (max((n for node in x if (n := node.meta.get(key)) is not None), default=0) for x in blocks)
        return last, last - before

    def _renumber(self, node: fx.Node, number: int) -> None:
        """Give a node of this unit the numbers that it would have in the whole graph."""
        times = self.of.times
        for key, (last, width) in self.counts.items():
            old = node.meta.get(key)
            if old is None:
                continue
            if 0 <= number <= times and last - 2 * width < old <= last + width:
                node.meta[key] = old + number * width
            elif old > last - (width if number > times else 0):
                node.meta[key] = old + times * width


def _always(position: int) -> Callable[[int], int]:
    return lambda _: position


def _signature(stack: dict[str, Any]) -> tuple[Any, ...]:
    return tuple((key, str(entry[0])) for key, entry in stack.items())


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    return _flat(node.meta.get("val"))


def _flat(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)


def _shares(value: torch.Tensor, argument: fx.Node) -> bool:
    return any(storage_key(value) == storage_key(x) for x in _tensors(argument))


def _twin(node: fx.Node, arguments: dict[fx.Node, fx.Node]) -> Any:
    """Return a value like a node's, in memory of its own, or in that of its new arguments where the node's is in its
    arguments'."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for old, new in arguments.items():
        pairs += zip(_tensors(old), _tensors(new), strict=True)

    def twin(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(twin(x) for x in value)
        if not isinstance(value, torch.Tensor):
            return value
        shared = next((new for old, new in pairs if storage_key(old) == storage_key(value)), None)
        result = view_of(value, shared)
        pairs.append((value, result))
        return result

    return twin(node.meta.get("val"))

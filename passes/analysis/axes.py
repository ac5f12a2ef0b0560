"""The axes of a program: which dimensions of which tensors run over the same index.

Every dimension of every tensor is a product of axes, outermost first. The operators' labels (see
`zgraph.passes.spmd.sharding_rules`) say which axes are one: the rows of a weight, the last dimension of its product, the
heads that a view splits this dimension into and the columns of the weight that reads the heads are the same two axes.
So one decision, that an axis is split over ranks, says how every tensor is stored, through views of any kind. An axis
is cut in two where a view needs it; where two ways to cut an axis do not fit, the dimensions stay apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from zgraph.passes.spmd.sharding_rules import Label, Rule, getitem_of, operands_of, rule_of
from zgraph.program.node import value
from zgraph.program.program import InputRole, OutputRole, Program
from zgraph.program.sizes import stand_in

Axis = int
Shape = tuple[tuple[Axis, ...], ...]


class Axes:
    """The axes of one program's tensors, or of the tensors of the nodes in `only`. `rules` has the rule of each node
    that has one.
    """

    def __init__(self, program: Program | None, only: Iterable[fx.Node] | None = None) -> None:
        self.rules: dict[fx.Node, Rule] = {}
        self._sizes: list[int] = []
        self._same: list[Axis] = []
        self._parts: dict[Axis, tuple[Axis, Axis]] = {}
        self._shapes: dict[fx.Node, list[list[list[Axis]]]] = {}
        for node in only if program is None or only is not None else program.graph.nodes:  # type: ignore[union-attr]
            self.add(node)
        if program is None or only is not None:
            return
        parameters = program.input_nodes(InputRole.PARAMETER)
        for port, node in program.output_items():
            if port.role is OutputRole.GRADIENT and port.of is InputRole.PARAMETER and port.name in parameters:
                self.merge(node, parameters[port.name])

    # -- reading ------------------------------------------------------------------------------------------------------
    def size(self, axis: Axis) -> int:
        """Return the number of positions along an axis, or the number that stands for it (see
        `zgraph.program.sizes.stand_in`).
        """
        return self._sizes[axis]

    def shapes(self, node: fx.Node) -> list[Shape]:
        """Return the axes of each of a node's tensors, dimension by dimension."""
        return [tuple(tuple(self._leaves(dim)) for dim in shape) for shape in self._shapes.get(node, [])]

    def shape(self, node: fx.Node) -> Shape:
        """Return the axes of the tensor of a node that has exactly one, dimension by dimension."""
        return self.shapes(node)[0]

    def under(self, node: fx.Node, rule: Rule, label: Label) -> tuple[Axis, ...]:
        """Return the axes of one of a rule's labels; none if they can't be told apart from the other axes of their
        dimension.
        """
        sources = [*zip(rule.operands, [self.shape(o) for o in operands_of(node)], strict=True)]
        sources += zip(rule.results, self.shapes(node), strict=True)
        for dims, shape in sources:
            for labels, axes in zip(dims, shape, strict=True):
                if label in labels:
                    before = math.prod(rule.sizes[x] for x in labels[: labels.index(label)])
                    return tuple(self._between(axes, before, rule.sizes[label]))
        return ()

    def _between(self, axes: Sequence[Axis], outer: int, size: int) -> list[Axis]:
        """Return the axes of a dimension that come after `outer` positions and have `size` in all; none if no axes are
        cut that way.
        """
        passed, group, product = 1, [], 1
        for axis in axes:
            if passed < outer:
                passed *= self.size(axis)
            elif product < size:
                group.append(axis)
                product *= self.size(axis)
        return group if passed == outer and product == size else []

    # -- building -----------------------------------------------------------------------------------------------------
    def add(self, node: fx.Node) -> None:
        """Give a node's tensors their axes; its operands must have theirs."""
        if node.op == "output":
            return
        at = getitem_of(node)
        if at is not None and node.args[0] in self._shapes:
            self._shapes[node] = [self._shapes[node.args[0]][at]]  # type: ignore[index]
            return
        given = value(node)
        several = given if isinstance(given, (tuple, list)) else [given]
        self._shapes[node] = fresh = [
            [self._fresh(s) for s in t.shape] if isinstance(t, torch.Tensor) else [] for t in several
        ]
        rule = rule_of(node) if node.op == "call_function" else None
        if rule is None:
            return
        self.rules[node] = rule
        known: dict[Label, list[Axis]] = {}
        read = [self._shapes[o][0] for o in operands_of(node)]
        for dims, shape in [*zip(rule.operands, read, strict=True), *zip(rule.results, fresh, strict=True)]:
            for labels, axes in zip(dims, shape, strict=True):
                for label, mine in zip(labels, self._cut(axes, [rule.sizes[x] for x in labels]), strict=True):
                    if mine is not None and known.setdefault(label, mine) is not mine:
                        self._unify(known[label], mine)

    def alias(self, node: fx.Node, other: fx.Node) -> None:
        """Give a node's tensors the axes of another's."""
        self._shapes[node] = self._shapes[other]

    def merge(self, node: fx.Node, other: fx.Node) -> None:
        """Make the axes of a node's tensors the same as those of a node that it replaces or belongs to."""
        for one, two in zip(self._shapes[node], self._shapes[other], strict=True):
            for a, b in zip(one, two, strict=True):
                self._unify(a, b)

    def _fresh(self, size: Any) -> list[Axis]:
        number = stand_in(size)
        return [] if number == 1 else [self._new(number)]

    def _new(self, size: int) -> Axis:
        self._sizes.append(size)
        self._same.append(len(self._same))
        return len(self._same) - 1

    def _find(self, axis: Axis) -> Axis:
        while self._same[axis] != axis:
            self._same[axis] = axis = self._same[self._same[axis]]
        return axis

    def _leaves(self, axes: Sequence[Axis]) -> list[Axis]:
        leaves: list[Axis] = []
        stack = list(axes)[::-1]
        while stack:
            axis = self._find(stack.pop())
            if axis in self._parts:
                stack += self._parts[axis][::-1]
            else:
                leaves.append(axis)
        return leaves

    def _cut(self, axes: list[Axis], sizes: Sequence[int]) -> list[list[Axis] | None]:
        """Return a dimension's axes in groups of these sizes, cutting axes where needed; None for each group that can't
        be formed.
        """
        left = self._leaves(axes)[::-1]
        groups: list[list[Axis] | None] = []
        for size in sizes:
            group: list[Axis] = []
            product = 1
            while product < size and size % product == 0 and left:
                axis = left.pop()
                want = size // product
                if self.size(axis) > want:
                    if self.size(axis) % want:
                        break
                    outer, inner = self._split(axis, want)
                    left += [inner]
                    axis = outer
                product *= self.size(axis)
                group.append(axis)
            if product != size:
                return [*groups, *([None] * (len(sizes) - len(groups)))]
            groups.append(group)
        return groups

    def _split(self, axis: Axis, outer: int) -> tuple[Axis, Axis]:
        parts = self._new(outer), self._new(self.size(axis) // outer)
        self._parts[axis] = parts
        return parts

    def _unify(self, one: list[Axis], other: list[Axis]) -> None:
        """Make two lists of axes, of the same size in all, the same, as far as both can be cut alike."""
        first, second = self._leaves(one)[::-1], self._leaves(other)[::-1]
        while first and second:
            for stack in (first, second):
                stack += self._leaves([stack.pop()])[::-1]  # (it may have been cut meanwhile)
            a, b = first.pop(), second.pop()
            if a == b:
                continue
            if self.size(a) == self.size(b):
                self._same[max(a, b)] = min(a, b)
                continue
            big, small = (a, b) if self.size(a) > self.size(b) else (b, a)
            if not self.size(small) or self.size(big) % self.size(small):
                return
            self._split(big, self.size(small))
            first.append(a)
            second.append(b)

"""Builds nodes for some of the rows of a program's tensors, and puts the results of all rows together.

Rows are an axis (see `zgraph.passes.analysis.axes`) that a dimension of a tensor has, alone or between others, cut into
pieces of as equal sizes as can be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from zgraph.passes.analysis.axes import Axes, Axis
from zgraph.passes.spmd.local_sizes import SIZES
from zgraph.passes.spmd.sharding_rules import Rule, argument, operands_of
from zgraph.program import collectives
from zgraph.program.node import NodeInfo, tensor, tensors
from zgraph.program.program import Program
from zgraph.program.transfers import mark_exchange

aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
_LOSSES = {aten.nll_loss_forward.default, aten.nll_loss_backward.default}
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}
"""Matrix products."""
_CUTS: dict[object, int] = {  # (by operator, the argument that is the dimension to cut)
    aten.slice.Tensor: 1,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
}
_SHAPES = "tensor_meta"  # (torch's own note of whole shapes)


def elements(node: fx.Node) -> int:
    """Return the number of elements of the largest of a node's tensors."""
    return max((t.numel() for t in tensors(node)), default=0)


def rows_of(axes: Axes, node: fx.Node, axis: Axis) -> bool:
    """Return whether any of a node's tensors has this axis."""
    return any(axis in dim for shape in axes.shapes(node) for dim in shape)


def sliced(axes: Axes, node: fx.Node, axis: Axis) -> tuple[bool, ...] | None:
    """Return, for each result of an operator computed for some of the rows, whether it has these rows; one without is a
    term of a sum.

    Returns None for an operator that can't be computed for some of the rows.
    """
    rule = _rule(axes, node)
    if rule is None or node.target is collectives.ALL_TO_ALL:  # (its split sizes count rows of all chunks)
        return None
    if node.target in _CUTS:
        operand = operands_of(node)[0]
        if axis in axes.shape(operand)[argument(node, _CUTS[node.target], 0) % tensor(operand).dim()]:
            return None  # (its arguments are positions of rows)
    labels = [x for x in rule.sizes if axis in axes.under(node, rule, x)]
    if len(labels) != 1 or labels[0] in rule.whole:
        return None
    label = labels[0]
    operands = enumerate(zip(rule.operands, [axes.shape(o) for o in operands_of(node)], strict=True))
    known = [(dims, shape) for i, (dims, shape) in operands if i not in rule.unread or any(dims)]
    results = [*zip(rule.results, axes.shapes(node), strict=True)]
    for dims, shape in [*known, *results]:
        for names, own in zip(dims, shape, strict=True):
            if own.count(axis) != (label in names):
                return None
        if sum(label in names for names in dims) > 1:
            return None
    kinds = tuple(any(label in names for names in dims) for dims, _ in results)
    return kinds if all(kinds) or (rule.reduction == "sum" and not rule.alike) else None


def _rule(axes: Axes, node: fx.Node) -> Rule | None:
    """Return an operator's rule; a loss counts as a sum over its rows (for a mean, the number of rows is known
    beforehand).
    """
    rule = axes.rules.get(node)
    return rule if rule is None or node.target not in _LOSSES else replace(rule, whole=rule.whole - {"n"})


class Slices:
    """A builder of nodes for `count` pieces of the rows along one axis."""

    def __init__(self, program: Program, axes: Axes, axis: Axis, count: int) -> None:
        self.program, self.axes, self.axis, self.count = program, axes, axis, count
        size, rest = divmod(axes.size(axis), count)
        self.starts = [chunk * size + min(chunk, rest) for chunk in range(count + 1)]

    def one(self, node: fx.Node, chunk: int, now: Callable[[fx.Node], fx.Node], record: NodeInfo) -> fx.Node:
        """Build a node for the rows of one chunk."""
        args: Any = fx.node.map_arg(node.args, now)
        kwargs: Any = fx.node.map_arg(node.kwargs, now)
        at = SIZES.get(node.target)
        if at is not None:
            args = (*args[:at], self._shape(node, 0, chunk), *args[at + 1 :])
        if node.target is aten.view.default:
            source: fx.Node = args[0]
            args = (self._viewable(source, self._shape(node, 0, chunk), record), args[1])
        new_node = self._call(node.target, args, record, f"{node.name}_{chunk}", **kwargs)
        for key, note in node.meta.items():
            if key != _SHAPES:
                new_node.meta.setdefault(key, note)
        expected = [self._shape(node, i, chunk) for i, _ in enumerate(tensors(node))]
        if [list(t.shape) for t in tensors(new_node)] != expected:
            raise AssertionError(
                f"{node.name} of one chunk is {[list(t.shape) for t in tensors(new_node)]}, not {expected}"
            )
        return new_node

    def total(
        self, node: fx.Node, chunk: int, now: Callable[[fx.Node], fx.Node], record: NodeInfo, before: fx.Node | None
    ) -> fx.Node:
        """Build the sum over the rows of the chunks so far; `before` is the sum without this chunk's rows."""
        if before is not None and node.target is aten.mm.default and wide(node) is tensor(node).dtype:
            terms = (before, *(now(o) for o in operands_of(node)))  # (addmm: the product is never in memory by itself)
            return self._call(aten.addmm.default, terms, record, node.name)
        term = self.cast(self.one(node, chunk, now, record), wide(node), record)
        return term if before is None else self._call(aten.add.Tensor, (before, term), record, node.name)

    # -- slices, and what they are put together to --------------------------------------------------------------------
    def _place(self, node: fx.Node) -> tuple[int, int, int]:
        """Return the dimension that has the rows, and the sizes of the axes outside and inside of theirs."""
        shape = self.axes.shape(node)
        dim = next(d for d, axes in enumerate(shape) if self.axis in axes)
        at = shape[dim].index(self.axis)
        sizes = [self.axes.size(a) for a in shape[dim]]
        return dim, math.prod(sizes[:at]), math.prod(sizes[at + 1 :])

    def _shape(self, node: fx.Node, at: int, chunk: int) -> list[int]:
        """Return the sizes of one of a node's tensors in a chunk."""
        whole, mine = self.axes.size(self.axis), self.starts[chunk + 1] - self.starts[chunk]
        shape = [*tensors(node)][at].shape
        axes = self.axes.shapes(node)[at]
        return [n // whole * mine if self.axis in dim else n for n, dim in zip(shape, axes, strict=True)]

    def slice(self, node: fx.Node, chunk: int, record: NodeInfo) -> fx.Node:
        dim, outer, inner = self._place(node)
        bounds = self.starts[chunk] * inner, self.starts[chunk + 1] * inner
        name = f"{node.name}_{chunk}"
        if outer == 1:
            return self._call(aten.slice.Tensor, (node, dim, *bounds), record, name)
        opened = self._view(node, _opened(tensor(node).shape, dim, outer), record)
        cut = self._call(aten.slice.Tensor, (opened, dim + 1, *bounds), record, name)
        return self._view(cut, self._shape(node, 0, chunk), record)

    def joined(self, pieces: Sequence[fx.Node], node: fx.Node, record: NodeInfo) -> fx.Node:
        """Join the rows of all chunks, with the node's order of dimensions in memory."""
        dim, outer, _ = self._place(node)
        if outer > 1:
            opened = [self._view(p, _opened(tensor(p).shape, dim, outer), record) for p in pieces]
            joined = self._call(aten.cat.default, (opened, dim + 1), record, node.name)
            return self._view(joined, tensor(node).shape, record)
        strides = tensor(node).stride()
        order = sorted(range(len(strides)), key=lambda d: -strides[d])
        if order == list(range(len(strides))):
            return self._call(aten.cat.default, (list(pieces), dim), record, node.name)
        turned = [self._call(aten.permute.default, (p, order), record, node.name) for p in pieces]
        joined = self._call(aten.cat.default, (turned, order.index(dim)), record, node.name)
        back = [order.index(d) for d in range(len(order))]
        return self._call(aten.permute.default, (joined, back), record, node.name)

    def _view(self, node: fx.Node, shape: Sequence[int], record: NodeInfo) -> fx.Node:
        return self._call(aten.view.default, (self._viewable(node, shape, record), list(shape)), record, node.name)

    def _viewable(self, node: fx.Node, shape: Sequence[int], record: NodeInfo) -> fx.Node:
        """Return the node, or a contiguous clone if it can't be viewed with this shape: a slice between other rows is
        not contiguous.
        """
        try:
            with self.program.fake_mode:
                tensor(node).view(list(shape))
        except (RuntimeError, ValueError):
            return self._call(aten.clone.default, (node,), record, node.name, memory_format=torch.contiguous_format)
        return node

    def cast(self, node: fx.Node, dtype: torch.dtype, record: NodeInfo) -> fx.Node:
        return node if tensor(node).dtype is dtype else self._call(_CAST, (node, dtype), record, node.name)

    def _call(self, target: Any, args: tuple[Any, ...], record: NodeInfo, name: str, **kwargs: Any) -> fx.Node:
        new_node = self.program.call(target, args, record.replace(transfer=None), name=name, kwargs=kwargs)
        mark_exchange(new_node)
        return new_node


def wide(node: fx.Node) -> torch.dtype:
    """Return the dtype in which terms are summed: a sum of many terms in a low dtype would lose the precision that one
    product keeps.
    """
    dtype = tensor(node).dtype
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _opened(shape: Sequence[int], dim: int, outer: int) -> list[int]:
    return [*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :]]

"""Sparse attention over a sequence that ranks have parts of: a rank gets the keys that its queries read, and no others.

What no rank's queries read, by the layout, stays where it is. A hop is the rows that ranks send to those which are so many places behind them:
those that the queries of any rank read there; of the n - 1 hops all are skipped that have none (`zgraph.program.attention_of_rows`). Rows go
directly to where they are read, all hops at once. A rank then computes all that its queries see in one operator, whose numbers are those of
whole attention. A mask is whole on each rank. In the backward keys and values are sent once more, and their gradients back. Which rows are read is
known for one length, so each length is a program of its own, as all lengths of context parallelism are.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Sequence

import torch
from torch import fx

from zgraph.passes.analysis.axes import Axes, Axis
from zgraph.passes.spmd.choose_placements import Strategy
from zgraph.passes.spmd.placements import REPLICATE, Placement, Placements, Shard
from zgraph.passes.spmd.reshard import Resharder
from zgraph.passes.spmd.ring import ROWS, Ring, is_causal
from zgraph.passes.spmd.sharding_rules import operands_of
from zgraph.program.attention_of_rows import OF_ROWS, Hop, hops_of
from zgraph.program.node import NodeInfo, tensor
from zgraph.program.sizes import is_symbolic
from zgraph.program.sparse_attention import LAYOUT_AT, SPARSE, SPARSE_BACKWARD, SPARSE_BACKWARD_WITH_MASK

aten = torch.ops.aten

SPARSE_RINGS = set(OF_ROWS)
_TENSORS: dict[object, int] = {SPARSE: 3, SPARSE_BACKWARD: 6}  # the first arguments, which have rows


def can_ring_sparse(node: fx.Node, axes: Axes, along: Collection[Axis], folded: Collection[Axis]) -> bool:
    """Return whether sparse attention can be computed so, where ranks have parts of sequences along these axes, folded or not."""
    if node.target not in SPARSE_RINGS or node not in axes.rules or _learns_mask(node):
        return False
    first = 0 if node.target is SPARSE else 1
    given = operands_of(node)[first : first + 3]
    if tensor(given[0]).device.type != "cpu" or any(map(is_symbolic, tensor(given[0]).shape[1:3])):
        return False
    queries, keys, values = (axes.shape(o)[ROWS] for o in given)
    if any(len(row) != 1 or row[0] not in along for row in (queries, keys)) or keys != values:
        return False
    return axes.size(queries[0]) == axes.size(keys[0]) and (queries[0] in folded) == (keys[0] in folded)


def _learns_mask(node: fx.Node) -> bool:
    """Return whether the mask of an attention has a gradient."""
    return any(user.target is SPARSE_BACKWARD_WITH_MASK for result in node.users for user in result.users)


def sparse_ring_way(placements: Placements, node: fx.Node, along: Collection[Axis]) -> Strategy | None:
    """Return the way to compute it so; None where it can't be."""
    if not can_ring_sparse(node, placements.axes, along, placements.folded):
        return None
    operands: list[Placement] = [REPLICATE] * len(operands_of(node))
    for at, operand in enumerate(operands_of(node)[: _TENSORS[node.target]]):
        operands[at] = Shard(placements.axes.shape(operand)[ROWS][0], ROWS)
    if node.target is SPARSE:
        return Strategy(tuple(operands), (operands[0], operands[0]), _forward)
    return Strategy(tuple(operands), tuple(operands[1:4]), _backward)


def _forward(reshard: Resharder, node: fx.Node, given: list[fx.Node], record: NodeInfo) -> tuple[fx.Node, ...]:
    return _SparseRing(reshard, node, record).forward(given)


def _backward(reshard: Resharder, node: fx.Node, given: list[fx.Node], record: NodeInfo) -> tuple[fx.Node, ...]:
    return _SparseRing(reshard, node, record).backward(given)


class _SparseRing(Ring):
    """A builder for one such operator."""

    def __init__(self, reshard: Resharder, node: fx.Node, record: NodeInfo) -> None:
        super().__init__(reshard, node, record)
        axis = reshard.axes.shape(operands_of(node)[1])[ROWS][0]
        self.pieces = 2 if axis in reshard.folded else 1
        heads, length = self.captured[0].shape[1:3]
        self.own = length // self.ranks
        layout = str(node.args[LAYOUT_AT[node.target]])
        self.hops = hops_of(layout, heads, length, is_causal(node), self.ranks, self.pieces)

    # -- forward and backward -----------------------------------------------------------------------------------------
    def forward(self, given: list[fx.Node]) -> tuple[fx.Node, ...]:
        q, k, v, *rest = given
        counts = self.reshard.counts
        counts["skipped"] = counts.get("skipped", 0) + self.ranks - 1 - len(self.hops)
        return self._computed(2, [q, *self._gathered([k, v]), *rest])

    def backward(self, given: list[fx.Node]) -> tuple[fx.Node, ...]:
        grad, q, k, v, *rest = given
        dq, *of_gathered = self._computed(3, [grad, q, *self._gathered([k, v]), *rest])
        parts = [self._cut(x) for x in of_gathered]
        distances = [self.ranks - hop.distance for hop in self.hops]
        came = self._passed_on([x for of_hops in parts for x in of_hops[:-1]], distances * len(parts))
        dtype = tensor(given[5]).dtype  # (of sums)
        gradients = [dq]
        for at, of_hops in enumerate(parts):
            total = self._cast(of_hops[-1], dtype)
            for hop, x in zip(self.hops, came[at * len(self.hops) :], strict=False):
                total = self._with_added(total, self._cast(x, dtype), hop)
            gradients.append(total)
        return tuple(self._cast(x, like.dtype) for x, like in zip(gradients, self.captured, strict=True))

    def _computed(self, results: int, given: list[fx.Node]) -> tuple[fx.Node, ...]:
        """Return the results of the operator for this rank's rows."""
        captured, _ = self.reshard.placements.arguments[self.node]
        left = iter(given)
        args = list(fx.node.map_arg(captured, lambda _: next(left)))  # type: ignore[arg-type]
        args += [None, 0.0][len(args) - LAYOUT_AT[self.node.target] - 1 :]  # (no dropout)
        told = (self.reshard.place(), self.ranks, self.pieces)
        attention = self._call(OF_ROWS[self.node.target], (*args, *told), self.node.name)
        return tuple(self._call(operator.getitem, (attention, at), self.node.name) for at in range(results))

    # -- rows of hops -------------------------------------------------------------------------------------------------
    def _gathered(self, values: Sequence[fx.Node]) -> list[fx.Node]:
        """Return the rows of these values that this rank's queries read: those of each hop, and its own."""
        sent = [self._rows(x, hop) for x in values for hop in self.hops]
        came = self._passed_on(sent, [hop.distance for hop in self.hops] * len(values))
        count = len(self.hops)
        return [self._joined([*came[at * count : (at + 1) * count], x]) for at, x in enumerate(values)]

    def _rows(self, x: fx.Node, hop: Hop) -> fx.Node:
        """Return the rows that a hop sends."""
        if self._is_whole(hop):
            return x
        return self._joined([self._slice(x, first, end) for first, end in hop.ranges])

    def _is_whole(self, hop: Hop) -> bool:
        return hop.ranges == ((0, self.own),)

    def _cut(self, gathered: fx.Node) -> list[fx.Node]:
        """Return the rows of each hop, and this rank's own, of what is computed for the gathered rows."""
        ends = [0]
        for count in [*(sum(end - first for first, end in hop.ranges) for hop in self.hops), self.own]:
            ends.append(ends[-1] + count)
        return [self._slice(gathered, first, end) for first, end in itertools.pairwise(ends)]

    def _with_added(self, total: fx.Node, part: fx.Node, hop: Hop) -> fx.Node:
        """Return the gradients of this rank's rows, with those that have come for the rows of a hop."""
        if self._is_whole(hop):
            return self._sum(total, part)
        pieces, last, at = [], 0, 0
        for first, end in hop.ranges:
            pieces += [self._slice(total, last, first)] if first > last else []
            more = self._slice(part, at, at + end - first)
            pieces.append(self._sum(self._slice(total, first, end), more))
            last, at = end, at + end - first
        pieces += [self._slice(total, last, self.own)] if last < self.own else []
        return self._joined(pieces)

    def _slice(self, x: fx.Node, first: int, end: int) -> fx.Node:
        if first == 0 and end == tensor(x).shape[ROWS]:
            return x
        return self._call(aten.slice.Tensor, (x, ROWS, first, end), "rows")

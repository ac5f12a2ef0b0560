"""Attention inside of packed documents over a sequence that ranks have parts of: a ring in which keys travel with the
numbers of their documents.

As in `zgraph.passes.spmd.ring` keys and values are passed around, and blocks' results are combined by their sums of
exponentials; with them go the numbers of their documents and, where queries see only what is not behind them, their
order. A block of another rank's keys computes only what lies in documents of both (`zgraph.program.packed_attention`):
most often one document that a border between ranks cuts, or nothing. So pieces of the sequence keep their order, and
are not folded.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

from torch import fx

from zgraph.passes.analysis.axes import Axes, Axis
from zgraph.passes.spmd.choose_placements import Strategy
from zgraph.passes.spmd.placements import Placement, Placements, Shard
from zgraph.passes.spmd.reshard import Resharder
from zgraph.passes.spmd.ring import ROWS, Ring
from zgraph.passes.spmd.sharding_rules import operands_of
from zgraph.program.node import NodeInfo, tensor
from zgraph.program.packed_attention import BLOCK, BLOCK_BACKWARD, PACKED, PACKED_BACKWARD

PACKED_RINGS = {PACKED, PACKED_BACKWARD}
_TENSORS = {PACKED: 3, PACKED_BACKWARD: 6}  # the first arguments; then come documents, order, is_causal, scale


def can_ring_packed(node: fx.Node, axes: Axes, along: Collection[Axis]) -> bool:
    """Return whether a ring can compute attention inside of packed documents, where ranks have parts of sequences along
    these axes.
    """
    if node.target not in PACKED_RINGS or node not in axes.rules:
        return False
    count = _TENSORS[node.target]
    order, is_causal = node.args[count + 1 : count + 3]
    if is_causal and order is None:
        return False
    first = 0 if node.target is PACKED else 1
    given = operands_of(node)
    rows = [axes.shape(o)[ROWS] for o in given[first : first + 3]] + [axes.shape(o)[-1] for o in given[count:]]
    return all(len(row) == 1 and row == rows[0] for row in rows) and rows[0][0] in along


def packed_ring_way(placements: Placements, node: fx.Node, along: Collection[Axis]) -> Strategy | None:
    """Return the way to compute it by a ring; None where a ring can't."""
    if not can_ring_packed(node, placements.axes, along):
        return None
    operands: list[Placement] = []
    for operand in operands_of(node):
        shape = placements.axes.shape(operand)
        at = ROWS if len(shape) > ROWS else len(shape) - 1
        operands.append(Shard(shape[at][0], at))
    if node.target is PACKED:
        return Strategy(tuple(operands), (operands[0], operands[0]), _forward)
    return Strategy(tuple(operands), tuple(operands[1:4]), _backward)


def _forward(reshard: Resharder, node: fx.Node, given: list[fx.Node], record: NodeInfo) -> tuple[fx.Node, ...]:
    return _PackedRing(reshard, node, record).forward(given)


def _backward(reshard: Resharder, node: fx.Node, given: list[fx.Node], record: NodeInfo) -> tuple[fx.Node, ...]:
    return _PackedRing(reshard, node, record).backward(given)


class _PackedRing(Ring):
    """A builder of the ring for one such operator."""

    def forward(self, given: list[fx.Node]) -> tuple[fx.Node, ...]:
        q, k, v, *places = given
        merged = self._some(PACKED, [q, k, v], places)
        moved = [k, v, *places]
        for _ in range(1, self.ranks):
            moved = self._passed_on(moved)
            merged = self._merged(merged, self._some(BLOCK, [q, *moved[:2]], places, moved[2:]))
        return self._cast(merged[0], self.captured[0].dtype), merged[1]

    def backward(self, given: list[fx.Node]) -> tuple[fx.Node, ...]:
        grad, q, k, v, out, lse, *places = given
        dq, *dkv = self._of_some(PACKED_BACKWARD, [grad, q, k, v, out, lse], places)
        moved = [k, v, *places]
        for _ in range(1, self.ranks):
            *moved, dk, dv = self._passed_on([*moved, *dkv])
            more = self._of_some(BLOCK_BACKWARD, [grad, q, *moved[:2], out, lse], places, moved[2:])
            dq, *dkv = (self._sum(x, y) for x, y in zip((dq, dk, dv), more, strict=True))
        dkv = self._passed_on(dkv)
        return tuple(self._cast(x, like.dtype) for x, like in zip((dq, *dkv), self.captured, strict=True))

    def _some(
        self, target: object, given: list[fx.Node], places: list[fx.Node], others: list[fx.Node] | None = None
    ) -> tuple[fx.Node, fx.Node]:
        """Return the output of queries with some keys and values, in the dtype of sums, and the logarithm of the sums
        of exponentials.
        """
        out, lse = self._called(target, given, places, others, 2)
        return self._cast(out, tensor(lse).dtype), lse

    def _of_some(
        self, target: object, given: list[fx.Node], places: list[fx.Node], others: list[fx.Node] | None = None
    ) -> list[fx.Node]:
        """Return the gradients of queries, keys and values from some of the keys, in the dtype of sums."""
        packed = [self.reshard.packed(x, self.record) for x in given]
        return [self._cast(x, tensor(given[5]).dtype) for x in self._called(target, packed, places, others, 3)]

    def _called(
        self, target: object, given: list[fx.Node], places: list[fx.Node], others: list[fx.Node] | None, results: int
    ) -> list[fx.Node]:
        args, _ = self.reshard.placements.arguments[self.node]
        rest = args[_TENSORS[self.node.target] + 2 :]  # type: ignore[index]
        documents, order = places[0], places[1] if len(places) > 1 else None
        at: tuple[object, ...] = (documents, order)
        if others is not None:
            at = (documents, others[0], order, others[1] if order is not None else None)
        attention = self._call(target, (*given, *at, *rest), self.node.name)
        return [self._call(operator.getitem, (attention, number), self.node.name) for number in range(results)]

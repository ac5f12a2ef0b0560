"""Attention over a sequence that ranks have parts of, by passing keys and values around (Ring Attention, Liu et al.
2023).

Each rank computes its queries with its own keys and values, then with those of the rank before it, and so on; the
blocks' results are combined by their sums of exponentials. No rank ever has all keys and values, and heads need not be
divided. Where queries see only what is before them, a rank has a piece from the front and one from the back of the
sequence (a folded axis, see `Placements`): then exactly half of each other rank's keys are needed, as two blocks of the
same size on every rank, and only which two blocks differs between ranks (the balance of Striped Attention, Brandon et
al. 2023, and of zigzag rings). In the backward, gradients of keys and values travel along with them, and are back on
their own rank after a full round.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
from torch import fx

from zgraph.passes.analysis.axes import Axes, Axis
from zgraph.passes.spmd.choose_placements import Strategy
from zgraph.passes.spmd.placements import REPLICATE, Placement, Placements, Shard, bytes_of
from zgraph.passes.spmd.reshard import Resharder
from zgraph.passes.spmd.sharding_rules import argument, operands_of
from zgraph.program import collectives, cpu_attention
from zgraph.program.node import NodeInfo, Role, tensor

aten = torch.ops.aten

_FORWARD = {
    cpu_attention.FORWARD,
    aten._scaled_dot_product_flash_attention.default,
}
_BACKWARD = {
    cpu_attention.BACKWARD,
    aten._scaled_dot_product_flash_attention_backward.default,
}
RINGS = _FORWARD | _BACKWARD
"""Operators that also give, or take, the logarithm of the sum of exponentials."""

ROWS = 2  # the dimension of queries, keys and values, [batch, heads, rows, width], that is the sequence's


def is_causal(node: fx.Node) -> bool:
    """Return whether queries of an attention operator see only what is before them."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    return bool(argument(node, names.index("is_causal"), False))


def can_ring(node: fx.Node, axes: Axes, along: Collection[Axis], folded: Collection[Axis]) -> bool:
    """Return whether a ring can compute an attention operator, where ranks have parts of sequences along these axes.

    It can't if there is a mask, nor if the queries see only what is before them along an axis that is not folded.
    """
    if node.target not in RINGS or node.kwargs.get("attn_mask") is not None or node not in axes.rules:
        return False  # (one with dropout has no rule)
    first = 0 if node.target in _FORWARD else 1
    shapes = [axes.shape(o) for o in operands_of(node)[first : first + 3]]
    if any(len(s) != 4 or len(s[ROWS]) != 1 or s[ROWS][0] not in along for s in shapes):
        return False
    queries, keys = shapes[0][ROWS], shapes[1][ROWS]
    return not is_causal(node) or (queries == keys and queries[0] in folded)


def ring_way(placements: Placements, node: fx.Node, along: Collection[Axis]) -> Strategy | None:
    """Return the way to compute an attention operator by a ring; None where a ring can't."""
    if not can_ring(node, placements.axes, along, placements.folded):
        return None
    operands: list[Placement] = []
    for operand in operands_of(node):
        shape = placements.axes.shape(operand)
        axis = shape[ROWS][0] if len(shape) > ROWS and shape[ROWS] else None
        operands.append(REPLICATE if axis is None else Shard(axis, ROWS))
    if node.target in _FORWARD:
        rows = operands[0]
        others = [REPLICATE] * (len(placements.axes.shapes(node)) - 2)
        return Strategy(tuple(operands), (rows, rows, *others), _forward)
    return Strategy(tuple(operands), (operands[1], operands[2], operands[3]), _backward)


def _forward(reshard: Resharder, node: fx.Node, given: list[fx.Node], record: NodeInfo) -> tuple[fx.Node, ...]:
    return Ring(reshard, node, record).forward(given)


def _backward(reshard: Resharder, node: fx.Node, given: list[fx.Node], record: NodeInfo) -> tuple[fx.Node, ...]:
    return Ring(reshard, node, record).backward(given)


class Ring:
    """A builder of the ring for one attention operator."""

    def __init__(self, reshard: Resharder, node: fx.Node, record: NodeInfo) -> None:
        self.reshard, self.node, self.record = reshard, node, record
        self.ranks = reshard.ranks
        self.captured = reshard.placements.captured[node]

    def _call(self, target: object, args: tuple[object, ...], name: str, **kwargs: object) -> fx.Node:
        return self.reshard.call(target, args, self.record, name, **kwargs)

    # -- forward ------------------------------------------------------------------------------------------------------
    def forward(self, given: list[fx.Node]) -> tuple[fx.Node, ...]:
        q, k, v = given[:3]
        causal = is_causal(self.node)
        first = self._block(q, k, v, causal)
        partials = [first]
        if causal:
            outs, sums = (self._halves(x) for x in first)
            partials = [*zip(outs, sums, strict=True)]
        for turn in range(1, self.ranks):
            k, v = self._passed_on([k, v])
            if not causal:
                partials[0] = self._merged(partials[0], self._block(q, k, v, False))
                continue
            earlier = self._is_earlier(turn)
            (q1, q2), (k1, k2), (v1, v2) = (self._halves(x) for x in (q, k, v))
            partials[1] = self._merged(partials[1], self._block(q2, k1, v1, False))
            qs, ks, vs = (self._either(earlier, x, y) for x, y in ((q1, q2), (k1, k2), (v1, v2)))
            out, lse = self._block(qs, ks, vs, False)
            nothing = self._number(-torch.inf, lse)
            seen = (self._either(earlier, *x) for x in ((lse, nothing), (nothing, lse)))
            partials = [self._merged(old, (out, new_lse)) for old, new_lse in zip(partials, seen, strict=True)]
        out, lse = (self._joined(x) for x in zip(*partials, strict=True))
        like = self.captured[0].dtype
        return self._cast(out, like), lse

    def _block(self, q: fx.Node, k: fx.Node, v: fx.Node, causal: bool) -> tuple[fx.Node, fx.Node]:
        """Return the output of some queries with some keys and values, and the logarithm of the sum of exponentials.

        The output is [batch, heads, rows, width] in the dtype of sums, the logarithm [batch, heads, rows].
        """
        args, kwargs = self.reshard.placements.arguments[self.node]
        attention = self._call(
            self.node.target, (q, k, v, args[3] if len(args) > 3 else 0.0, causal), self.node.name, **kwargs
        )
        out, lse = (self._call(operator.getitem, (attention, at), self.node.name) for at in (0, 1))
        return self._cast(out, tensor(lse).dtype), lse

    def _merged(self, one: tuple[fx.Node, fx.Node], other: tuple[fx.Node, fx.Node]) -> tuple[fx.Node, fx.Node]:
        """Return the output, and its logarithm, of the same queries with the keys of both."""
        top = self._call(aten.maximum.default, (one[1], other[1]), "top")
        shares = [
            self._call(aten.exp.default, (self._call(aten.sub.Tensor, (mine, top), "below"),), "share")
            for _, mine in (one, other)
        ]
        total = self._call(aten.log.default, (self._sum(shares[0], shares[1]),), "total")
        lse = self._sum(top, total)
        outs = []
        for out, mine in (one, other):
            share = self._call(aten.exp.default, (self._call(aten.sub.Tensor, (mine, lse), "share"),), "share")
            wide = self._call(aten.unsqueeze.default, (share, -1), "share")
            outs.append(self._call(aten.mul.Tensor, (out, wide), "term"))
        return self._call(aten.add.Tensor, tuple(outs), "out_of_both"), lse

    # -- backward -----------------------------------------------------------------------------------------------------
    def backward(self, given: list[fx.Node]) -> tuple[fx.Node, ...]:
        grad, q, k, v, out, lse = given[:6]
        causal = is_causal(self.node)
        rest = given[6:]
        dq, *dkv = self._gradients([grad, q, k, v, out, lse], rest, causal)
        for turn in range(1, self.ranks):
            k, v, *dkv = self._passed_on([k, v, *dkv])
            if not causal:
                more = self._gradients([grad, q, k, v, out, lse], rest, False)
                dq, *dkv = (self._sum(x, y) for x, y in zip((dq, *dkv), more, strict=True))
                continue
            earlier = self._is_earlier(turn)
            halves = [self._halves(x) for x in (grad, q, k, v, out, lse)]
            low, high = [h[0] for h in halves], [h[1] for h in halves]
            crossed = [low[i] if i in (2, 3) else high[i] for i in range(6)]
            added = self._gradients(crossed, rest, False)
            either = [self._either(earlier, x, y) for x, y in zip(low, high, strict=True)]
            more = self._gradients(either, rest, False)
            sums = []
            for i, (total, one, other) in enumerate(zip((dq, *dkv), added, more, strict=True)):
                nothing = self._number(0.0, other)
                first, second = (self._either(earlier, *x) for x in ((other, nothing), (nothing, other)))
                at_keys = i > 0  # (the other block has the last queries and the first keys)
                both = [self._sum(first, one), second] if at_keys else [first, self._sum(second, one)]
                sums.append(self._sum(total, self._joined(both)))
            dq, *dkv = sums
        dkv = self._passed_on(dkv)
        likes = self.captured
        return tuple(self._cast(x, like.dtype) for x, like in zip((dq, *dkv), likes, strict=True))

    def _gradients(self, given: list[fx.Node], rest: list[fx.Node], causal: bool) -> list[fx.Node]:
        """Return the gradients of queries, keys and values from one block, in the dtype of sums; `out` and `lse` are
        those of all keys.
        """
        args, kwargs = self.reshard.placements.arguments[self.node]
        names = [a.name for a in self.node.target._schema.arguments]  # type: ignore[union-attr]
        packed = [self.reshard.packed(x, self.record) for x in given]
        left = iter([*packed, *rest])
        new = list(fx.node.map_arg(args, lambda _: next(left)))  # type: ignore[arg-type]
        new[names.index("is_causal")] = causal
        for name, x in (("max_q", given[1]), ("max_k", given[2])):
            if name in names:
                new[names.index(name)] = tensor(x).shape[ROWS]
        backward = self._call(self.node.target, tuple(new), self.node.name, **kwargs)
        gradients = [self._call(operator.getitem, (backward, at), self.node.name) for at in range(3)]
        return [self._cast(x, tensor(given[5]).dtype) for x in gradients]

    # -- what both are made of ----------------------------------------------------------------------------------------
    def _passed_on(self, values: Sequence[fx.Node], distances: Sequence[int] = ()) -> list[fx.Node]:
        """Return the values of the rank before this one, or of those that are so many places before it. All transfers
        start before the first is waited for.
        """
        dim, counts = self.reshard.dim, self.reshard.counts
        there = self.record.replace(role=Role.EXCHANGE, mesh_dim=dim, stream=f"comm:{dim}")
        starts = []
        for x, distance in zip(values, distances or [1] * len(values), strict=True):
            sent = self.reshard.packed(x, self.record)
            told = (sent, self.ranks, dim, *([] if distance == 1 else [distance]))
            start = self.reshard.call(collectives.SHIFT, told, there, f"{x.name}_passed")
            counts["shift"] = counts.get("shift", 0) + 1
            counts["bytes"] += int(bytes_of(tensor(sent)))
            starts.append(start)
        return [
            self.reshard.call(collectives.WAIT, (s,), there.replace(role=Role.WAIT), f"{s.name}_wait") for s in starts
        ]

    def _is_earlier(self, turn: int) -> fx.Node:
        """Return, as one element, whether this turn's keys are from a rank whose first piece is before this one's."""
        return self._call(aten.ge.Scalar, (self.reshard.place(), turn), "is_earlier")

    def _either(self, which: fx.Node, one: fx.Node, other: fx.Node) -> fx.Node:
        return self._call(aten.where.self, (which, one, other), "either")

    def _number(self, number: float, like: fx.Node) -> fx.Node:
        kind = tensor(like)
        return self._call(aten.full.default, ([], number), "nothing", dtype=kind.dtype, device=kind.device)

    def _halves(self, x: fx.Node) -> list[fx.Node]:
        """Return the two pieces of a folded axis, whose dimension is `ROWS`."""
        rows = tensor(x).shape[ROWS]
        cuts = ((0, rows // 2), (rows // 2, rows))
        return [self._call(aten.slice.Tensor, (x, ROWS, *cut), "half") for cut in cuts]

    def _joined(self, pieces: Sequence[fx.Node]) -> fx.Node:
        if len(pieces) == 1:
            return pieces[0]
        return self._call(aten.cat.default, (list(pieces), ROWS), "joined")

    def _sum(self, one: fx.Node, other: fx.Node) -> fx.Node:
        return self._call(aten.add.Tensor, (one, other), "sum")

    def _cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        if tensor(x).dtype is dtype:
            return x
        return self._call(torch.ops.prims.convert_element_type.default, (x, dtype), "cast")

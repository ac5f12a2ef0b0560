"""Attention over a sequence that ranks have parts of, by passing keys and values around (Ring Attention, Liu et al. 2023).

Each rank computes its queries with the keys and values that it has, then with those of the rank before it, and so on; what blocks
give is put together by their sums of exponentials. No rank ever has all keys and values, and heads need not be divided. Where
queries see only what is before them, a rank has a piece from the front and one from the back of the sequence (a folded axis, see
`Divider`): then of each other rank's keys exactly half are to be looked at, as two blocks of the same size on every rank, and which two
they are is all that differs between ranks (the balance of Striped Attention, Brandon et al. 2023, and of zigzag rings).
In the backward, gradients of keys and values travel along with them, and are at home after a whole turn.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
from torch import fx

from zgraph.passes.analysis.axes import Axes, Axis
from zgraph.passes.spmd.divide import Divider, Part, Way
from zgraph.passes.spmd.sharding_rules import argument, operands_of
from zgraph.program import collectives
from zgraph.program.node import NodeInfo, Role, tensor

aten = torch.ops.aten

_FORWARD = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
}
_BACKWARD = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
}
RINGS = _FORWARD | _BACKWARD
"""Operators that also give, or take, the logarithm of the sum of exponentials."""

ROWS = 2  # the dimension of queries, keys and values, [batch, heads, rows, width], that is the sequence's


def is_causal(node: fx.Node) -> bool:
    """Do queries of an attention operator see only what is before them?"""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    return bool(argument(node, names.index("is_causal"), False))


def can_ring(node: fx.Node, axes: Axes, along: Collection[Axis], folded: Collection[Axis]) -> bool:
    """Can an attention operator be computed by a ring, where ranks have parts of sequences along these axes? (One with a mask can't, nor one
    whose queries see what is before them, of an axis that is not folded.)"""
    if node.target not in RINGS or node.kwargs.get("attn_mask") is not None or node not in axes.rules:
        return False  # (one with dropout has no rule)
    first = 0 if node.target in _FORWARD else 1
    shapes = [axes.shape(o) for o in operands_of(node)[first : first + 3]]
    if any(len(s) != 4 or len(s[ROWS]) != 1 or s[ROWS][0] not in along for s in shapes):
        return False
    queries, keys = shapes[0][ROWS], shapes[1][ROWS]
    return not is_causal(node) or (queries == keys and queries[0] in folded)


class RingDivider(Divider):
    """A `Divider` that computes attention along the sequence by a ring wherever the operator can be taken apart so."""

    def _ways(self, node: fx.Node, rule: object, operands: Sequence[fx.Node]) -> list[Way]:
        way = self._ring(node, operands) if node.target in RINGS else None
        return [way] if way is not None else super()._ways(node, rule, operands)  # type: ignore[arg-type]

    def _ring(self, node: fx.Node, operands: Sequence[fx.Node]) -> Way | None:
        if not can_ring(node, self.axes, self.along, self.folded):
            return None
        lies: list[Part | None] = []
        for operand in operands:
            shape = self.axes.shape(operand)
            axis = shape[ROWS][0] if len(shape) > ROWS and shape[ROWS] else None
            lies.append(None if axis is None else Part(axis, ROWS))
        if node.target in _FORWARD:
            rows = lies[0]
            return Way(tuple(lies), (rows, rows, *([None] * (len(self.axes.shapes(node)) - 2))), self._forward)
        return Way(tuple(lies), (lies[1], lies[2], lies[3]), self._backward)

    # -- forward ------------------------------------------------------------------------------------------------------
    def _forward(self, _: Divider, node: fx.Node, given: list[fx.Node], record: NodeInfo) -> tuple[fx.Node, ...]:
        q, k, v = given[:3]
        causal = is_causal(node)
        first = self._block(node, q, k, v, causal, record)
        found = [first]
        if causal:
            outs, sums = (self._halves(x, record) for x in first)
            found = [*zip(outs, sums, strict=True)]
        for turn in range(1, self.ranks):
            k, v = self._passed_on([k, v], record)
            if not causal:
                found[0] = self._merged(found[0], self._block(node, q, k, v, False, record), record)
                continue
            earlier = self._is_earlier(turn, record)
            (q1, q2), (k1, k2), (v1, v2) = (self._halves(x, record) for x in (q, k, v))
            found[1] = self._merged(found[1], self._block(node, q2, k1, v1, False, record), record)
            qs, ks, vs = (self._either(earlier, x, y, record) for x, y in ((q1, q2), (k1, k2), (v1, v2)))
            out, lse = self._block(node, qs, ks, vs, False, record)
            nothing = self._number(-torch.inf, lse, record)
            seen = (self._either(earlier, *x, record) for x in ((lse, nothing), (nothing, lse)))
            found = [self._merged(old, (out, mine), record) for old, mine in zip(found, seen, strict=True)]
        out, lse = (self._joined_halves(x, record) for x in zip(*found, strict=True))
        like = self._fakes[node][0].dtype
        return self._cast(out, like, record), lse

    def _block(
        self, node: fx.Node, q: fx.Node, k: fx.Node, v: fx.Node, causal: bool, record: NodeInfo
    ) -> tuple[fx.Node, fx.Node]:
        """What some queries give with some keys and values: (out [batch, heads, rows, width] in the dtype of sums, the logarithm of the sum of
        exponentials [batch, heads, rows])."""
        args, kwargs = self._arguments[node]
        made = self._call(
            node.target, (q, k, v, args[3] if len(args) > 3 else 0.0, causal), record, node.name, **kwargs
        )
        out, lse = (self._call(operator.getitem, (made, at), record, node.name) for at in (0, 1))
        return self._cast(out, tensor(lse).dtype, record), lse

    def _merged(
        self, one: tuple[fx.Node, fx.Node], other: tuple[fx.Node, fx.Node], record: NodeInfo
    ) -> tuple[fx.Node, fx.Node]:
        """What the same queries give with the keys of both."""
        top = self._call(aten.maximum.default, (one[1], other[1]), record, "top")
        shares = [
            self._call(aten.exp.default, (self._call(aten.sub.Tensor, (mine, top), record, "below"),), record, "share")
            for _, mine in (one, other)
        ]
        total = self._call(aten.log.default, (self._sum(shares[0], shares[1], record),), record, "total")
        lse = self._sum(top, total, record)
        outs = []
        for out, mine in (one, other):
            share = self._call(
                aten.exp.default, (self._call(aten.sub.Tensor, (mine, lse), record, "share"),), record, "share"
            )
            wide = self._call(aten.unsqueeze.default, (share, -1), record, "share")
            outs.append(self._call(aten.mul.Tensor, (out, wide), record, "term"))
        return self._call(aten.add.Tensor, tuple(outs), record, "out_of_both"), lse

    # -- backward -----------------------------------------------------------------------------------------------------
    def _backward(self, _: Divider, node: fx.Node, given: list[fx.Node], record: NodeInfo) -> tuple[fx.Node, ...]:
        grad, q, k, v, out, lse = given[:6]
        causal = is_causal(node)
        rest = given[6:]
        dq, *dkv = self._gradients(node, [grad, q, k, v, out, lse], rest, causal, record)
        for turn in range(1, self.ranks):
            k, v, *dkv = self._passed_on([k, v, *dkv], record)
            if not causal:
                more = self._gradients(node, [grad, q, k, v, out, lse], rest, False, record)
                dq, *dkv = (self._sum(x, y, record) for x, y in zip((dq, *dkv), more, strict=True))
                continue
            earlier = self._is_earlier(turn, record)
            halves = [self._halves(x, record) for x in (grad, q, k, v, out, lse)]
            low, high = [h[0] for h in halves], [h[1] for h in halves]
            crossed = [low[i] if i in (2, 3) else high[i] for i in range(6)]
            added = self._gradients(node, crossed, rest, False, record)
            either = [self._either(earlier, x, y, record) for x, y in zip(low, high, strict=True)]
            more = self._gradients(node, either, rest, False, record)
            sums = []
            for i, (total, one, other) in enumerate(zip((dq, *dkv), added, more, strict=True)):
                nothing = self._number(0.0, other, record)
                first, second = (self._either(earlier, *x, record) for x in ((other, nothing), (nothing, other)))
                at_keys = i > 0  # (the block beside is of the last queries, and the first keys)
                both = [self._sum(first, one, record), second] if at_keys else [first, self._sum(second, one, record)]
                sums.append(self._sum(total, self._joined_halves(both, record), record))
            dq, *dkv = sums
        dkv = self._passed_on(dkv, record)
        likes = self._fakes[node]
        return tuple(self._cast(x, like.dtype, record) for x, like in zip((dq, *dkv), likes, strict=True))

    def _gradients(
        self, node: fx.Node, given: list[fx.Node], rest: list[fx.Node], causal: bool, record: NodeInfo
    ) -> list[fx.Node]:
        """Those of queries, keys and values from one block, in the dtype of sums; what queries gave is what they gave with all keys."""
        args, kwargs = self._arguments[node]
        names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
        packed = [self._packed(x, record) for x in given]
        left = iter([*packed, *rest])
        new = list(fx.node.map_arg(args, lambda _: next(left)))  # type: ignore[arg-type]
        new[names.index("is_causal")] = causal
        for name, x in (("max_q", given[1]), ("max_k", given[2])):
            if name in names:
                new[names.index(name)] = tensor(x).shape[ROWS]
        made = self._call(node.target, tuple(new), record, node.name, **kwargs)
        found = [self._call(operator.getitem, (made, at), record, node.name) for at in range(3)]
        return [self._cast(x, tensor(given[5]).dtype, record) for x in found]

    # -- what both are made of ----------------------------------------------------------------------------------------
    def _passed_on(self, values: Sequence[fx.Node], record: NodeInfo) -> list[fx.Node]:
        """What the rank before this one has. All transfers start before the first is waited for."""
        there = record.replace(role=Role.EXCHANGE, mesh_dim=self.options.dim, stream=f"comm:{self.options.dim}")
        starts = []
        for x in values:
            sent = self._packed(x, record)
            start = self._call(collectives.SHIFT, (sent, self.ranks, self.options.dim), there, f"{x.name}_passed")
            self.counts["shift"] = self.counts.get("shift", 0) + 1
            self.counts["bytes"] += int(self._bytes(tensor(sent)))
            starts.append(start)
        return [self._call(collectives.WAIT, (s,), there.replace(role=Role.WAIT), f"{s.name}_wait") for s in starts]

    def _is_earlier(self, turn: int, record: NodeInfo) -> fx.Node:
        """Are the keys that came in this turn from a rank whose first piece is before this one's? One element."""
        return self._call(aten.ge.Scalar, (self._place(), turn), record, "is_earlier")

    def _either(self, which: fx.Node, one: fx.Node, other: fx.Node, record: NodeInfo) -> fx.Node:
        return self._call(aten.where.self, (which, one, other), record, "either")

    def _number(self, number: float, like: fx.Node, record: NodeInfo) -> fx.Node:
        kind = tensor(like)
        return self._call(aten.full.default, ([], number), record, "nothing", dtype=kind.dtype, device=kind.device)

    def _halves(self, x: fx.Node, record: NodeInfo) -> list[fx.Node]:
        """The two pieces of a folded axis, whose dimension is `ROWS`."""
        rows = tensor(x).shape[ROWS]
        cuts = ((0, rows // 2), (rows // 2, rows))
        return [self._call(aten.slice.Tensor, (x, ROWS, *cut), record, "half") for cut in cuts]

    def _joined_halves(self, pieces: Sequence[fx.Node], record: NodeInfo) -> fx.Node:
        if len(pieces) == 1:
            return pieces[0]
        return self._call(aten.cat.default, (list(pieces), ROWS), record, "of_halves")

    def _sum(self, one: fx.Node, other: fx.Node, record: NodeInfo) -> fx.Node:
        return self._call(aten.add.Tensor, (one, other), record, "sum")

    def _cast(self, x: fx.Node, dtype: torch.dtype, record: NodeInfo) -> fx.Node:
        if tensor(x).dtype is dtype:
            return x
        return self._call(torch.ops.prims.convert_element_type.default, (x, dtype), record, "cast")

"""Replaces operators whose indexed (or, for dropout, drawn) dimension is divided: each rank looks up, or puts, only
what is in its part.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from zgraph.passes.spmd.placements import Shard
from zgraph.passes.spmd.reshard import Resharder
from zgraph.passes.spmd.sharding_rules import argument, operands_of
from zgraph.program.node import NodeInfo, tensor

aten = torch.ops.aten

Build = Callable[[Resharder, fx.Node, list[fx.Node], NodeInfo], "fx.Node | tuple[fx.Node, ...]"]
"""Builds a node's result (or results) from its operands, which have the placements that its way needs."""


def build_dropout(reshard: Resharder, node: fx.Node, given: list[fx.Node], record: NodeInfo) -> tuple[fx.Node, fx.Node]:
    """Build a dropout for which each rank draws for all, as one process would, and keeps its own part."""
    whole, like = reshard.placements.captured[operands_of(node)[0]], tensor(given[0])
    rate: float = argument(node, 1)
    sizes = {"dtype": torch.bool, "device": like.device}
    places = reshard.call(aten.empty.memory_format, (list(whole.shape),), record, "places", **sizes)
    drawn = reshard.call(aten.bernoulli.p, (places, 1 - rate), record, "drawn")
    part = reshard.placements.of(operands_of(node)[0])
    assert isinstance(part, Shard)
    mask = reshard.slice(drawn, reshard.axes.shape(operands_of(node)[0]), part, record)
    masked = reshard.call(aten.mul.Tensor, (given[0], mask), record, "kept")
    return reshard.call(aten.mul.Scalar, (masked, 1 / (1 - rate)), record, node.name), mask


def _near(reshard: Resharder, index: fx.Node, rows: int, record: NodeInfo) -> tuple[fx.Node, fx.Node]:
    """Return indices into this rank's `rows` (0 for those of another rank), and which indices are its own."""
    first = reshard.call(aten.mul.Scalar, (reshard.place(), rows), record, "first_row")
    moved = reshard.call(aten.sub.Tensor, (index, first), record, "local_index")
    low = reshard.call(aten.ge.Scalar, (moved, 0), record, "not_below")
    high = reshard.call(aten.lt.Scalar, (moved, rows), record, "not_above")
    own = reshard.call(aten.bitwise_and.Tensor, (low, high), record, "own")
    return _chosen(reshard, own, moved, 0, record, "own_index"), own


def _masked(reshard: Resharder, values: fx.Node, own: fx.Node, record: NodeInfo) -> fx.Node:
    """Return the values, zero where a row is another rank's."""
    for _ in range(tensor(values).dim() - tensor(own).dim()):
        own = reshard.call(aten.unsqueeze.default, (own, -1), record, "own")
    return _chosen(reshard, own, values, 0, record, "masked")


def _chosen(reshard: Resharder, where: fx.Node, values: fx.Node, other: int, record: NodeInfo, name: str) -> fx.Node:
    """Return the values where a condition is true, one number elsewhere."""
    like = tensor(values)
    number = reshard.call(aten.full.default, ([], other), record, "number", dtype=like.dtype, device=like.device)
    return reshard.call(aten.where.self, (where, values, number), record, name)


def _embedding(reshard: Resharder, node: fx.Node, given: list[fx.Node], record: NodeInfo) -> fx.Node:
    near, own = _near(reshard, given[1], tensor(given[0]).shape[0], record)
    rows = reshard.call(aten.embedding.default, (given[0], near), record, node.name)
    return _masked(reshard, rows, own, record)


def _embedding_backward(reshard: Resharder, node: fx.Node, given: list[fx.Node], record: NodeInfo) -> fx.Node:
    index = given[1]
    count, padding, by_frequency = (argument(node, at) for at in (2, 3, 4))
    rows = count // reshard.ranks
    near, own = _near(reshard, index, rows, record)
    if padding is not None and padding >= 0:
        real = reshard.call(aten.ne.Scalar, (index, padding), record, "not_padding")
        own = reshard.call(aten.bitwise_and.Tensor, (own, real), record, "own")
    grads = _masked(reshard, given[0], own, record)
    return reshard.call(aten.embedding_dense_backward.default, (grads, near, rows, -1, by_frequency), record, node.name)


def _gather(reshard: Resharder, node: fx.Node, given: list[fx.Node], record: NodeInfo) -> fx.Node:
    dim: int = argument(node, 1)
    near, own = _near(reshard, given[1], tensor(given[0]).shape[dim], record)
    elements = reshard.call(aten.gather.default, (given[0], dim, near), record, node.name)
    return _masked(reshard, elements, own, record)


def _scatter(reshard: Resharder, node: fx.Node, given: list[fx.Node], record: NodeInfo) -> fx.Node:
    """Build a scatter, or a sum into rows, in which indices of other ranks' rows go to one more row, which is dropped."""
    dim: int = argument(node, 1)
    shape = list(tensor(given[0]).shape)
    rows = shape[dim]
    near, own = _near(reshard, given[1], rows, record)
    near = _chosen(reshard, own, near, rows, record, "own_or_beyond")
    like = tensor(given[0])
    more = [1 if d == dim % len(shape) else s for d, s in enumerate(shape)]
    row = reshard.call(aten.full.default, (more, 0), record, "one_more", dtype=like.dtype, device=like.device)
    wide = reshard.call(aten.cat.default, ([given[0], row], dim), record, "wide")
    source = given[2] if len(given) > 2 else node.args[3]
    put = reshard.call(node.target, (wide, dim, near, source), record, node.name)
    return reshard.call(aten.slice.Tensor, (put, dim, 0, rows), record, "narrow")


LOOK_UP = {aten.embedding.default, aten.gather.default}
# The argument that is the indexed dimension; operators without such an argument index dimension 0.
LEADS: dict[object, int] = {
    aten.gather.default: 1,
    aten.scatter.src: 1,
    aten.scatter.value: 1,
    aten.scatter_add.default: 1,
}
# Operators that can be computed by a rank's own indices into a dimension that is divided.
INDEXED: dict[object, Build] = {
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.gather.default: _gather,
    aten.scatter.src: _scatter,
    aten.scatter.value: _scatter,
    aten.scatter_add.default: _scatter,
}

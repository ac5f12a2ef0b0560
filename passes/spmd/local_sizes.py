"""Sizes among an operator's arguments, for a rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from zgraph.passes.spmd.placements import Placement, Replicate, Shard
from zgraph.passes.spmd.sharding_rules import argument
from zgraph.program import collectives
from zgraph.program.node import tensors, value
from zgraph.program.sizes import part_of, static, with_nodes

aten = torch.ops.aten

# The argument that is the size of the result.
SIZES: dict[object, int] = {
    aten.view.default: 1,
    aten._unsafe_view.default: 1,
    aten.reshape.default: 1,
    aten.expand.default: 1,
    aten.new_zeros.default: 1,
    aten.new_ones.default: 1,
    aten.new_full.default: 1,
    aten.new_empty.default: 1,
    aten.full.default: 0,
    aten.zeros.default: 0,
    aten.ones.default: 0,
    aten.empty.memory_format: 0,
    aten.slice_backward.default: 1,
    aten.select_backward.default: 1,
}

# Operators that give pieces of their operand.
_CUTS = {aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor}


def localise(node: fx.Node, results: Sequence[Placement], ranks: int) -> None:
    """Replace the sizes among a node's arguments by those of a rank's parts."""
    at = SIZES.get(node.target)
    if node.target is collectives.ALL_TO_ALL and not isinstance(results[0], Replicate):
        if isinstance(results[0], Shard) and results[0].dim == 0:
            for place in (1, 2):
                sizes = [value(n) if isinstance(n, fx.Node) else n for n in argument(node, place)]
                node.update_arg(place, with_nodes(node.graph, [part_of(n, ranks) for n in sizes]))
        return
    if at is None and node.target not in _CUTS:
        return
    shapes = [list(t.shape) for t in tensors(node)]
    local = [
        [part_of(n, ranks) if d == s.dim else n for d, n in enumerate(shapes[i])]
        if isinstance(s, Shard)
        else list(shapes[i])
        for i, s in enumerate(results)
    ]
    if at is not None:
        node.update_arg(at, with_nodes(node.graph, local[0]))
    else:
        _localise_cut(node, shapes, local, ranks)


def _localise_cut(node: fx.Node, shapes: list[list[Any]], local: list[list[Any]], ranks: int) -> None:
    if node.target is aten.slice.Tensor:
        dim = argument(node, 1, 0) % len(shapes[0])
        if static(shapes[0][dim]) != static(local[0][dim]):
            for place in (2, 3):
                bound = argument(node, place)
                if isinstance(bound, fx.Node):
                    node.update_arg(place, with_nodes(node.graph, part_of(value(bound), ranks)))
                elif bound is not None and bound < 2**31:
                    node.update_arg(place, bound // ranks)
        return
    dim = argument(node, 2, 0) % len(shapes[0])
    if node.target is aten.split.Tensor:
        node.update_arg(1, with_nodes(node.graph, local[0][dim]))
    else:
        node.update_arg(1, with_nodes(node.graph, [shape[dim] for shape in local]))

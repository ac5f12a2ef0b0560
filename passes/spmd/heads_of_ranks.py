"""Divides sparse attention among ranks by its heads where these have different layouts, or weights are dropped.

The program is one for all ranks, and the layouts of all heads stand in it; each rank's operator takes those of its own heads, by the rank's
place (`zgraph.program.attention_of_heads`). A rank's heads lie one after another, as a part of a dimension does.
"""

from __future__ import annotations

import operator
from dataclasses import replace

from torch import fx

from zgraph.passes.spmd.choose_placements import FindWay, Strategy, ways_along
from zgraph.passes.spmd.placements import REPLICATE, Placements, Shard
from zgraph.passes.spmd.reshard import Resharder
from zgraph.passes.spmd.sharding_rules import argument, operands_of
from zgraph.plan.attention import sparsity_of
from zgraph.program.attention_of_heads import OF_HEADS
from zgraph.program.node import NodeInfo, value
from zgraph.program.sparse_attention import LAYOUT_AT


def way_by_heads(placements: Placements, node: fx.Node) -> Strategy | None:
    """Return the way to compute sparse attention whose heads differ, in layouts or in what is dropped: by heads if an operand is divided, else
    whole. None where all heads are alike, or no rule."""
    rule = placements.axes.rules.get(node)
    layout_at = LAYOUT_AT[node.target]
    drops = argument(node, layout_at + 1) is not None
    if rule is None or not (drops or sparsity_of(str(node.args[layout_at])).heads_differ):
        return None
    operands = operands_of(node)
    axes = placements.axes.under(node, rule, "h") if "h" in rule.sizes else ()
    if axes and placements.divides(axes[0]) and any(isinstance(placements.of(o), Shard) for o in operands):
        by_heads = ways_along(placements, node, axes[0])
        if by_heads:
            return replace(by_heads[0], build=_build)
    return Strategy((REPLICATE,) * len(operands), (REPLICATE,) * len(placements.axes.shapes(node)))


def _build(reshard: Resharder, node: fx.Node, given: list[fx.Node], record: NodeInfo) -> tuple[fx.Node, ...]:
    left = iter(given)
    args = fx.node.map_arg(node.args, lambda _: next(left))
    args = (*args, *(None, 0.0)[len(args) - LAYOUT_AT[node.target] - 1 :])
    attention = reshard.call(OF_HEADS[node.target], (*args, reshard.place(), reshard.ranks), record, node.name)  # type: ignore[misc]
    return tuple(
        reshard.call(operator.getitem, (attention, at), record, node.name) for at in range(len(value(attention)))
    )


WAYS: dict[object, FindWay] = dict.fromkeys(OF_HEADS, way_by_heads)
"""By operator: how ranks compute it where heads have different layouts."""

"""Divides sparse attention among ranks by its heads where these have different layouts.

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
from zgraph.passes.spmd.sharding_rules import operands_of
from zgraph.plan.attention import sparsity_of
from zgraph.program.attention_of_heads import OF_HEADS
from zgraph.program.node import NodeInfo, value


def _way(placements: Placements, node: fx.Node) -> Strategy | None:
    """Return the way to compute sparse attention whose heads differ: by heads if an operand is divided, else whole. None where all heads
    have one layout, or no rule."""
    rule = placements.axes.rules.get(node)
    if rule is None or not sparsity_of(_layout(node)).heads_differ:
        return None
    operands = operands_of(node)
    axes = placements.axes.under(node, rule, "h") if "h" in rule.sizes else ()
    if axes and placements.divides(axes[0]) and any(isinstance(placements.of(o), Shard) for o in operands):
        by_heads = ways_along(placements, node, axes[0])
        if by_heads:
            return replace(by_heads[0], build=_build)
    return Strategy((REPLICATE,) * len(operands), (REPLICATE,) * len(placements.axes.shapes(node)))


def _layout(node: fx.Node) -> str:
    return str(node.args[-1])


def _build(reshard: Resharder, node: fx.Node, given: list[fx.Node], record: NodeInfo) -> tuple[fx.Node, ...]:
    left = iter(given)
    args = fx.node.map_arg(node.args, lambda _: next(left))
    attention = reshard.call(OF_HEADS[node.target], (*args, reshard.place(), reshard.ranks), record, node.name)  # type: ignore[misc]
    return tuple(
        reshard.call(operator.getitem, (attention, at), record, node.name) for at in range(len(value(attention)))
    )


WAYS: dict[object, FindWay] = dict.fromkeys(OF_HEADS, _way)
"""By operator: how ranks compute it where heads have different layouts."""

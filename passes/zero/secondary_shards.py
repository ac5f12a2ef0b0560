"""In ZeRO stage 3 the backward gathers weights from the ranks of one node (ZeRO++'s hpZ: Wang et al., 2023, "ZeRO++:
Extremely Efficient Collective Communication for Giant Model Training").

    forward:   shard -> all_gather over all ranks -> the whole parameter -> this rank's secondary shard of it: kept
    backward:  the secondary shard -> all_gather over the ranks of the node -> the whole parameter

*Contract.* On entry the backward gathers weights from the shards of all ranks. On exit it gathers the weights that the
forward gathers as well from secondary shards: each rank of a block of `ranks` keeps 1 / `ranks` of these weights from
the forward to the backward. The values that are gathered are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from zgraph.passes.analysis.parameter_collectives import ParameterCollective, gathers_of
from zgraph.passes.contract import graph_pass
from zgraph.passes.zero.gathers import identifier_of
from zgraph.program import collectives
from zgraph.program.groups import block_of
from zgraph.program.node import NodeInfo, Phase, Role, info, set_info, tensor
from zgraph.program.program import Fact, Program

aten = torch.ops.aten


@dataclass(frozen=True)
class SecondaryOptions:
    """Options of `secondary_shards`."""

    ranks: int  # how many consecutive ranks of the mesh dimension that shards weights keep one copy between them


@graph_pass(
    "secondary_shards",
    "the backward gathers weights from the ranks of a node, which keep a copy between them",
    options=SecondaryOptions,
    requires=(Fact.REGATHERED,),
    conflicts=(Fact.KEPT, Fact.BUCKETED),
)
def secondary_shards(program: Program, options: SecondaryOptions) -> dict[str, int]:
    gathers = gathers_of(program)
    first = {g.name: g for g in gathers if info(g.start).phase is Phase.FORWARD}
    again = [g for g in gathers if info(g.start).phase is Phase.BACKWARD and g.name in first]
    parts: dict[str, fx.Node] = {}
    places: dict[str, fx.Node] = {}
    part_bytes = changed = 0
    for gather in again:
        dim = collectives.group_of(gather.start)
        group = block_of(dim, options.ranks, program.mesh)
        if group == dim:
            continue
        if gather.name not in parts:
            if dim not in places:
                places[dim] = _place(program, dim, options.ranks)
            parts[gather.name] = _part(program, first[gather.name], places[dim], options.ranks)
            part_bytes += tensor(parts[gather.name]).nbytes
        _gather_from(program, gather, parts[gather.name], group, options.ranks)
        changed += 1
    return {"gathers": changed, "kept_bytes": part_bytes}


def _place(program: Program, dim: str, ranks: int) -> fx.Node:
    """Return this rank's position in its block, as an int64 tensor of one element."""
    position = program.position(dim, "secondary_shards")
    with program.graph.inserting_after(position):
        return program.call(aten.remainder.Scalar, (position, ranks), info(position), name="place_in_node")


def _part(program: Program, gather: ParameterCollective, place: fx.Node, ranks: int) -> fx.Node:
    """Build this rank's secondary shard of a gathered weight, after the weight's first reader. Its rows are those of an
    even division.
    """
    start = info(gather.start)
    record = NodeInfo(
        Phase.FORWARD,
        role=Role.LAYOUT,
        module=start.module,
        source=start.source,
        param=start.param,
        made_by="secondary_shards",
    )
    whole, slug = gather.wait, identifier_of(gather.name)
    rows, *rest = tensor(whole).shape
    with program.graph.inserting_after(gather.readers()[0]):
        blocks = program.call(aten.view.default, (whole, [ranks, rows // ranks, *rest]), record, name=f"parts_{slug}")
    with program.graph.inserting_after(blocks):
        mine = program.call(aten.index.Tensor, (blocks, [place]), record, name=f"mine_{slug}")
    with program.graph.inserting_after(mine):
        return program.call(aten.view.default, (mine, [rows // ranks, *rest]), record, name=f"part_{slug}")


def _gather_from(program: Program, gather: ParameterCollective, part: fx.Node, group: str, ranks: int) -> None:
    """Let a gather start from a secondary shard, over the ranks of a block."""
    start, unused = gather.start, gather.before
    start.args = (part, ranks, group)
    for node in (start, gather.wait):
        set_info(node, info(node).replace(mesh_dim=group))
    for node in reversed(unused):
        if not node.users:
            program.graph.erase_node(node)

"""Makes the process groups of a mesh's nodes: blocks of consecutive ranks of `dp` that share a node."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zgraph.program.groups import block_of, lines_of
from zgraph.program.program import DATA_DIMS
from zgraph.torch_compat import process_groups


def node_groups(mesh: DeviceMesh, ranks: int | None) -> dict[str, Any]:
    """Return the group of this rank's node, by its name in programs ("dp/8"); {} if there is one node only, or `ranks`
    (a node's number of ranks) is None. All ranks must call it, as each makes the groups of all nodes.
    """
    names, dim = list(mesh.mesh_dim_names or ()), DATA_DIMS[0]
    if ranks is None or dim not in names:
        return {}
    at = names.index(dim)
    sizes = {dim: mesh.size(at)}
    name = block_of(dim, ranks, sizes)
    if name == dim:
        return {}
    lines = mesh.mesh.movedim(at, -1).reshape(-1, mesh.size(at)).tolist()
    blocks = [[line[p] for p in positions] for line in lines for positions in lines_of(name, sizes)]
    timeout = process_groups.world_timeout()
    groups = [dist.new_group(block, timeout=timeout) for block in blocks]
    return {name: next(g for g, block in zip(groups, blocks, strict=True) if dist.get_rank() in block)}

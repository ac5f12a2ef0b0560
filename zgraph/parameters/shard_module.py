"""Replace each parameter of the user's module by this rank's shard."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zgraph.parameters.meta_init import initialize_meta_tensors
from zgraph.parameters.shards import Shards
from zgraph.program.program import ParamSpec

if TYPE_CHECKING:
    from zgraph.offload.run_transfers import Tier


def shard(
    module: nn.Module,
    specs: dict[str, ParamSpec],
    mesh: DeviceMesh | None,
    device: torch.device,
    seed: int,
    home: Tier | None = None,
    own: Collection[str] | None = None,
) -> Shards:
    """Replace each parameter by its shard, one parameter (on the meta device: one module) at a time. In a pipeline
    `own` are the parameters of this rank; the others go to the meta device.
    """
    shards = Shards(module, specs, _parameter_mesh(mesh, specs), home=home)
    shards.look_up()
    elsewhere = shards.elsewhere = frozenset() if own is None else frozenset(specs) - frozenset(own)
    for name in elsewhere:
        shards.drop_to_meta(name)
    initialize_meta_tensors(shards, device, seed, elsewhere)
    for name, param in list(shards.params().items()):
        if name not in elsewhere and not isinstance(param, DTensor):
            shards.install(name, param.detach())
    return shards


def _parameter_mesh(mesh: DeviceMesh | None, specs: dict[str, ParamSpec]) -> DeviceMesh | None:
    """Return the mesh that parameters are sharded over. A dimension of tensor parallelism comes first, since its parts
    are sharded over the others. (A `DTensor` is cut by its mesh's dimensions in order; so plain `Shard`s describe it.)
    """
    first = {s.division.mesh_dim for s in specs.values() if s.division is not None}
    names = (mesh.mesh_dim_names or ()) if mesh is not None else ()
    order = sorted(range(len(names)), key=lambda i: names[i] not in first)
    if mesh is None or order == sorted(order):
        return mesh
    groups = [mesh.get_group(names[i]) for i in order]
    return DeviceMesh.from_group(
        groups,
        mesh.device_type,
        mesh=mesh.mesh.permute(order).contiguous(),
        mesh_dim_names=tuple(names[i] for i in order),
    )

"""DTensors: made of a local tensor and a layout, and told from those of another rank."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, debug
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, Shard

_world: weakref.ref[Any] | None = None  # the default process group at the last `forget_destroyed_meshes`


def forget_destroyed_meshes() -> None:
    """Clear torch's cache of the layouts that DTensor operators give, if there is another default process group than before.

    The cache takes a mesh for another one of equal shape, also where the groups of that one were destroyed: results would then
    communicate over them, or over what has their names now.
    """
    global _world
    group = dist.group.WORLD
    if _world is not None and _world() is group:
        return
    _world = None if group is None else weakref.ref(group)
    debug._clear_sharding_prop_cache()


def dtensor(local: torch.Tensor, like: DTensorSpec) -> DTensor:
    """Return the DTensor of this layout whose local tensor is `local`: `DTensor.from_local` without autograd, in a
    tenth of the time."""
    return DTensor(local, like, requires_grad=False)  # type: ignore[call-arg]


def layout(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """Return the layout of a DTensor, for `dtensor`."""
    return DTensorSpec(mesh, tuple(placements), TensorMeta(torch.Size(shape), tuple(stride), dtype))


def shard_of_another_rank(value: Any) -> tuple[int, ...] | None:
    """Return the mesh coordinate of the rank that pickled a shard, if it is not this rank's; None for anything else."""
    if not isinstance(value, DTensor) or all(p.is_replicate() for p in value.placements):
        return None
    mesh = value.device_mesh
    theirs = mesh.get_coordinate()  # (pickled with the mesh)
    mine = (mesh.mesh == torch.distributed.get_rank()).nonzero()
    if theirs is None or (len(mine) == 1 and mine[0].tolist() == list(theirs)):
        return None
    return tuple(theirs)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor, below autograd; another tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def part_of(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return a view of what this rank holds of a whole tensor."""
    mesh = like.device_mesh
    for at, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            size, rank = whole.shape[placement.dim], mesh.get_local_rank(at)
            most = -(-size // mesh.size(at))
            start = min(most * rank, size)
            whole = whole.narrow(placement.dim, start, min(most, size - start))
    return whole


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor.detach()`, for a DTensor in a tenth of the time."""
    if isinstance(tensor, DTensor):
        return dtensor(tensor._local_tensor.detach(), tensor._spec)
    return tensor.detach()

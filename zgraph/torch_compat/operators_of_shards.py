"""Operators that are treated otherwise than torch does where tensors are divided over ranks.

What torch offers is a table of the operators that DTensors treat otherwise. An entry is in it only while a compiled model
lives, and for tensors on meshes of such models alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

Treatment = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]
"""What is called in an operator's place: with the operator, its arguments, and its keyword arguments."""

_meshes: list[DeviceMesh] = []
"""The mesh of each model that is watched."""


def treat_operators(owner: Any, mesh: DeviceMesh, treatments: Mapping[Any, Treatment]) -> None:
    """While `owner` lives, treat operators on tensors of this mesh as these say. (All owners give the same.)"""
    _meshes.append(mesh)
    table().update(treatments)
    weakref.finalize(owner, _unwatch, mesh, tuple(treatments)).atexit = False


def _unwatch(mesh: DeviceMesh, operators: tuple[Any, ...]) -> None:
    del _meshes[next(at for at, other in enumerate(_meshes) if other is mesh)]
    if not _meshes:
        for operator in operators:
            table().pop(operator, None)


def table() -> dict[Any, Any]:
    """Return torch's own table."""
    found: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers  # type: ignore[attr-defined]
    return found


def is_of_a_model(tensor: DTensor) -> bool:
    """Return whether a tensor is on the mesh of a compiled model."""
    return tensor.device_mesh in _meshes


def is_divided(tensor: DTensor) -> bool:
    """Return whether ranks have different parts of a tensor."""
    mesh = tensor.device_mesh
    return any(not p.is_replicate() and mesh.size(d) > 1 for d, p in enumerate(tensor.placements))

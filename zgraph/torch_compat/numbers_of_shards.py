"""Numbers that are read of tensors which are divided over ranks (`item()`, `float(…)`, `if tensor:`).

torch reads the number of a rank's own part, without a word: a norm of a gradient would be another one on each rank, and the
whole one on none. What torch offers is a table of the operators that DTensors treat otherwise. An entry is in it only while a
compiled model lives, and for tensors on meshes of such models alone.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zgraph.errors import ModelError
from zgraph.torch_compat.dtensors import local_of

_READ = torch.ops.aten._local_scalar_dense.default
_TORCH = os.path.dirname(torch.__file__) + os.sep
_meshes: list[DeviceMesh] = []
"""The mesh of each model that is watched."""


def watch_numbers(owner: Any, mesh: DeviceMesh) -> None:
    """While `owner` lives, give an optimizer's step the number of a whole tensor on this mesh, and refuse to read one elsewhere."""
    _meshes.append(mesh)
    _table()[_READ] = _read
    weakref.finalize(owner, _unwatch, mesh).atexit = False


def _unwatch(mesh: DeviceMesh) -> None:
    del _meshes[next(at for at, other in enumerate(_meshes) if other is mesh)]
    if not _meshes:
        _table().pop(_READ, None)


def _table() -> dict[Any, Any]:
    table: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers  # type: ignore[attr-defined]
    return table


def _read(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Read the number of a DTensor of one element."""
    tensor: DTensor = args[0]
    mesh = tensor.device_mesh
    divided = any(not p.is_replicate() and mesh.size(d) > 1 for d, p in enumerate(tensor.placements))
    if divided and mesh in _meshes:
        if not _in_optimizer_step():
            raise ModelError(
                "a number is read of a tensor that is divided over the ranks",
                where=_reader(),
                why="each rank has another part of the weights and gradients, and would read the number of its own",
                hint="value.full_tensor() first, on all ranks; model.zgraph.grad_norms() for norms of gradients; "
                "zgraph.full_weights(model) for weights; or zero=0 in the plan, with which each rank has them whole",
            )
        with torch.no_grad():
            tensor = tensor.full_tensor()  # type: ignore[assignment]
    return operator(local_of(tensor))  # (as torch does)


def _in_optimizer_step() -> bool:
    """Return whether what runs was called by the step of an optimizer, which all ranks make together."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None  # (whatever it is called)
        if code.co_name == "step" and isinstance(owner, torch.optim.Optimizer):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _reader() -> str:
    """Return the file and line that read the number, outside of torch."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"

"""Operators that are treated otherwise than torch does where tensors are divided over ranks.

What torch offers is a table of the operators that DTensors treat otherwise. An entry is in it only while a compiled model
lives, and for tensors on meshes of such models alone.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(__file__) + os.sep
_INITIALIZATIONS = torch.nn.init.__file__

Treatment = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]
"""What is called in an operator's place: with the operator, its arguments, and its keyword arguments."""

_meshes: list[DeviceMesh] = []
"""The mesh of each model that is watched."""
_of_torch: dict[Any, Any] = {}
"""While models are watched: the entries of torch's table that those of the models have replaced."""


def treat_operators(owner: Any, mesh: DeviceMesh, treatments: Mapping[Any, Treatment]) -> None:
    """While `owner` lives, treat operators on tensors of this mesh as these say. (All owners give the same.)"""
    if not _meshes:
        _of_torch.update({o: table()[o] for o in treatments if o in table()})
    _meshes.append(mesh)
    table().update(treatments)
    weakref.finalize(owner, _unwatch, mesh, tuple(treatments)).atexit = False


def _unwatch(mesh: DeviceMesh, operators: tuple[Any, ...]) -> None:
    del _meshes[next(at for at, other in enumerate(_meshes) if other is mesh)]
    if not _meshes:
        for operator in operators:
            table().pop(operator, None)
        table().update(_of_torch)
        _of_torch.clear()


def table() -> dict[Any, Any]:
    """Return torch's own table."""
    found: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers  # type: ignore[attr-defined]
    return found


@functools.cache
def with_strategies() -> frozenset[Any]:
    """Return the operators that torch's DTensors have."""
    propagator = DTensor._op_dispatcher.sharding_propagator  # type: ignore[attr-defined]
    return frozenset({*propagator.op_strategy_funcs, *propagator.op_to_rules, *propagator.op_single_dim_strategy_funcs})


def is_of_a_model(tensor: DTensor) -> bool:
    """Return whether a tensor is on the mesh of a compiled model."""
    return tensor.device_mesh in _meshes


def is_divided(tensor: DTensor) -> bool:
    """Return whether ranks have different parts of a tensor."""
    mesh = tensor.device_mesh
    return any(not p.is_replicate() and mesh.size(d) > 1 for d, p in enumerate(tensor.placements))


def as_torch_does(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what torch's own treatment of DTensors gives, and raise what it raises."""
    known = table()
    treatment = known.pop(operator, None)
    if operator in _of_torch:
        known[operator] = _of_torch[operator]
    try:
        return operator(*args, **kwargs)
    finally:
        if treatment is not None:
            known[operator] = treatment


def called_by_all_ranks() -> bool:
    """Return whether what runs was called by the step of an optimizer or by one of torch.nn.init, which all ranks call together; what
    a step's closure does is not the step's own."""
    frame, passed = sys._getframe(1), set()
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _INITIALIZATIONS:
            return True
        if code.co_name == "step" and code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])  # (whatever it is called)
            if isinstance(owner, torch.optim.Optimizer) and _code_of(frame.f_locals.get("closure")) not in passed:
                return True
        passed.add(code)
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _code_of(function: Any) -> Any:
    """Return the code of a function, or of an object that is called as one; None if there is none."""
    if not callable(function):
        return None
    return getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)


def line_of_caller() -> str:
    """Return the file and line that called the operator, outside of torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, _HERE)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"

"""Applies mixed precision to the user's own module: dtypes of its parameters and buffers, and modules that stay in
float32.

What programs cast (weights before their gather, gradients before their reduction, inputs and outputs) is recorded in
`ParamSpec` and done by capture and passes. This file has what is done to the module itself, once, when it is compiled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from zgraph.errors import ModelError, PlanError
from zgraph.names import around, matches, module_names, parameter_names
from zgraph.plan.precision import Precision
from zgraph.program.program import ParamSpec


def with_precision(spec: ParamSpec, precision: Precision, stays: Collection[str]) -> ParamSpec:
    """Return a parameter's layout with its dtypes; `stays` are the modules that compute in float32. Only floating-point
    parameters of 16 or 32 bits change.
    """
    if spec.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return spec
    if all(getattr(precision, field) is None for field in ("parameter", "compute", "reduce", "accumulate")):
        return spec
    if spec.name.rpartition(".")[0] in stays:
        return replace(spec, dtype=torch.float32)
    stored = precision.dtype("parameter") or spec.dtype
    low = stored in (torch.bfloat16, torch.float16)
    return replace(
        spec,
        dtype=stored,
        compute=precision.dtype("compute") or stored,
        reduce=precision.dtype("reduce"),
        accumulate=precision.dtype("accumulate") or (torch.float32 if low else stored),
    )


def stays_fp32(module: nn.Module, precision: Precision) -> set[str]:
    """Return the modules that compute in float32, by all of their names: those for which a pattern matches the module,
    one above it, or a parameter of its own.

    A norm whose running statistics stay in float32 computes in it too, since torch has no operator for the mixture; so
    does each module that shares a parameter with one of these, since a tied parameter has one dtype.
    """
    names, tied = module_names(module), parameter_names(module)
    first = {n: every[0] for every in tied.values() for n in every}
    own: dict[str, set[str]] = {}
    chosen: set[str] = set()
    for path, child in module.named_modules():
        paths = names[path]
        own[path] = {first[_inside(path, key)] for key, p in child._parameters.items() if p is not None}
        read = [n for name in own[path] for n in tied[name]]
        norm = isinstance(child, _NormBase) and child.running_mean is not None and precision.buffer is None
        if norm or matches(around([*paths, *read]), precision.keep_fp32):
            chosen.add(path)
    shared: set[str] = set()
    while True:
        shared |= {name for path in chosen for name in own[path]}
        more = {path for path, names_there in own.items() if names_there & shared} - chosen
        if not more:
            return {n for path in chosen for n in names[path]}
        chosen |= more


def _inside(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def check(module: nn.Module, precision: Precision, specs: dict[str, ParamSpec]) -> None:
    """Raise `PlanError` for a pattern of `keep_fp32` that matches nothing."""
    for fault in faults_of(module, precision, specs):
        raise fault


def faults_of(module: nn.Module, precision: Precision, specs: dict[str, ParamSpec]) -> Iterator[PlanError]:
    """Yield an error for each pattern of `keep_fp32` that matches nothing."""
    fitting = without_faults(module, precision).keep_fp32
    for pattern in precision.keep_fp32:
        if pattern not in fitting:
            yield PlanError(
                f"{pattern!r} matches no parameter and no module",
                where="precision.keep_fp32",
                hint=f"names look like {next(iter(specs), 'none')!r}",
            )


def without_faults(module: nn.Module, precision: Precision) -> Precision:
    """Return the precision with only those patterns of `keep_fp32` that match something."""
    names = [*module_names(module), *(n for every in parameter_names(module).values() for n in every)]
    fitting = tuple(p for p in precision.keep_fp32 if matches(names, [p]))
    return precision.model_copy(update={"keep_fp32": fitting})


def prepare(module: nn.Module, precision: Precision, specs: dict[str, ParamSpec]) -> contextlib.ExitStack:
    """Cast buffers, and let the modules that stay in float32 cast their inputs to it and their outputs back.

    Closing the returned stack (or leaving a `with` block around it) restores the module.
    """
    buffer = precision.dtype("buffer")
    low = precision.dtype("compute") or precision.dtype("parameter")
    names, stays = module_names(module), stays_fp32(module, precision)
    with contextlib.ExitStack() as undo:
        for path, child in module.named_modules():
            for key, tensor in list(child._buffers.items()):
                known = around(_inside(n, key) for n in names[path])
                if (
                    buffer is not None
                    and tensor is not None
                    and tensor.is_floating_point()
                    and not matches(known, precision.keep_fp32)
                ):
                    child._buffers[key] = tensor.to(buffer)
                    undo.callback(child._buffers.__setitem__, key, tensor)
            own = any(p is not None for p in child._parameters.values())
            if low in (torch.bfloat16, torch.float16) and own and path in stays:
                undo.callback(child.register_forward_pre_hook(_Cast(torch.float32).before, with_kwargs=True).remove)
                undo.callback(child.register_forward_hook(_Cast(low).after).remove)
        return undo.pop_all()


def release(module: nn.Module) -> None:
    """Remove the hooks that let modules stay in float32 (see `prepare`)."""
    for child in module.modules():
        for hooks in (child._forward_pre_hooks, child._forward_hooks):
            for key in [k for k, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), _Cast)]:
                del hooks[key]
                child._forward_pre_hooks_with_kwargs.pop(key, None)


class _Cast:
    """The hooks that cast floating-point tensors among a module's arguments, or in its result."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return pytree.tree_map(self._cast, (args, kwargs))

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return pytree.tree_map(self._cast, output)

    def _cast(self, x: Any) -> Any:
        return x.to(self.dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def too_large_for(module: nn.Module, precision: Precision) -> list[str]:
    """Return the parameters of this rank that float16 can't represent: infinite, NaN, or above 65504. Return [] unless
    the plan computes in float16.
    """
    if (precision.compute or precision.parameter) != "float16":
        return []
    largest = torch.finfo(torch.float16).max
    too_large = []
    for name, param in module.named_parameters():
        if param.is_meta or not param.is_floating_point() or not param.numel():
            continue
        top = param.detach().abs().max()
        if not bool(top <= largest):
            too_large.append(name)
    return too_large


def overflow_error(names: list[str]) -> ModelError:
    return ModelError(
        f"parameter {names[0]!r} has values that float16 can't hold"
        + (f" (and {len(names) - 1} more)" if names[1:] else ""),
        where="precision",
        why="it is infinite, no number, or larger than 65504 somewhere: every step would overflow",
        hint="load weights that are finite, or use bf16",
    )

"""Mixed precision on the user's own module: dtypes of its parameters and buffers, modules that stay in float32.

What programs cast (weights before their gather, gradients before their reduction, inputs and outputs) is said in
`ParamSpec` and done by capture and passes. Here is what is done to the module itself, once, when it is compiled.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from zgraph.errors import ModelError, PlanError
from zgraph.names import tied_name
from zgraph.precision import Precision
from zgraph.program.program import ParamSpec


def with_precision(spec: ParamSpec, precision: Precision, module: nn.Module) -> ParamSpec:
    """A parameter's dtypes. Only floating-point parameters of 16 or 32 bits take part."""
    if spec.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return spec
    if precision.compute is None and precision.parameter is None and precision.reduce is None:
        return spec
    if _stays(module, spec.name.rpartition(".")[0], precision):
        return replace(spec, dtype=torch.float32)
    held = precision.dtype("parameter") or spec.dtype
    low = held in (torch.bfloat16, torch.float16)
    return replace(
        spec,
        dtype=held,
        compute=precision.dtype("compute") or held,
        reduce=precision.dtype("reduce"),
        accumulate=torch.float32 if low else held,
    )


def _stays(module: nn.Module, path: str, precision: Precision) -> bool:
    """Does the module of this path compute in float32? Where a pattern matches it, one above it, or a parameter of its own.

    So does a norm with running statistics that stay in float32, since torch has no operator for such a mixture.
    """
    own = module.get_submodule(path)
    names = [f"{path}.{key}" if path else key for key in own._parameters]
    if any(matches(n, precision.keep_fp32) for n in [path, *names]):
        return True
    return isinstance(own, _NormBase) and own.running_mean is not None and precision.buffer is None


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Does a pattern match this name, or that of a module above it?"""
    parts = name.split(".")
    paths = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return any(fnmatch.fnmatchcase(path, p) for path in paths for p in patterns)


def check(module: nn.Module, precision: Precision, specs: dict[str, ParamSpec]) -> None:
    """Raises `PlanError` for a pattern of `keep_fp32` that matches nothing."""
    for fault in faults_of(module, precision, specs):
        raise fault


def faults_of(module: nn.Module, precision: Precision, specs: dict[str, ParamSpec]) -> Iterator[PlanError]:
    """Each pattern of `keep_fp32` that matches nothing."""
    names = [*specs, *(n for n, _ in module.named_modules())]
    for pattern in precision.keep_fp32:
        if not any(fnmatch.fnmatchcase(n, pattern) for n in names):
            tied = tied_name(pattern, module)
            yield PlanError(
                f"{pattern!r} matches no parameter and no module",
                where="precision.keep_fp32",
                why=f"a parameter that it names is tied to {tied!r}, and goes by that name" if tied else None,
                hint=f"name {tied!r}" if tied else f"names look like {next(iter(specs), 'none')!r}",
            )


def prepare(module: nn.Module, precision: Precision, specs: dict[str, ParamSpec]) -> contextlib.ExitStack:
    """Cast buffers, and let the modules that stay in float32 take and give what the others compute in.

    Where what it returns is closed (or a `with` block around it ends), the module is as it was.
    """
    buffer = precision.dtype("buffer")
    low = precision.dtype("compute") or precision.dtype("parameter")
    with contextlib.ExitStack() as undo:
        for path, child in module.named_modules():
            for key, held in list(child._buffers.items()):
                name = f"{path}.{key}" if path else key
                if (
                    buffer is not None
                    and held is not None
                    and held.is_floating_point()
                    and not matches(name, precision.keep_fp32)
                ):
                    child._buffers[key] = held.to(buffer)
                    undo.callback(child._buffers.__setitem__, key, held)
            own = any(p is not None for p in child._parameters.values())
            if low in (torch.bfloat16, torch.float16) and own and _stays(module, path, precision):
                undo.callback(child.register_forward_pre_hook(_Cast(torch.float32).before, with_kwargs=True).remove)
                undo.callback(child.register_forward_hook(_Cast(low).after).remove)
        return undo.pop_all()


class _Cast:
    """Hooks that cast floating-point tensors among a module's arguments, or its result."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return pytree.tree_map(self._cast, (args, kwargs))

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return pytree.tree_map(self._cast, output)

    def _cast(self, x: Any) -> Any:
        return x.to(self.dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def refuse_overflow(module: nn.Module, precision: Precision) -> list[str]:
    """The parameters of this rank that float16 can't hold: infinite, no number, or above 65504."""
    if (precision.compute or precision.parameter) != "float16":
        return []
    largest = torch.finfo(torch.float16).max
    found = []
    for name, param in module.named_parameters():
        if param.is_meta or not param.is_floating_point() or not param.numel():
            continue
        top = param.detach().abs().max()
        if not bool(top <= largest):
            found.append(name)
    return found


def overflow_error(names: list[str]) -> ModelError:
    return ModelError(
        f"parameter {names[0]!r} has values that float16 can't hold"
        + (f" (and {len(names) - 1} more)" if names[1:] else ""),
        where="precision",
        why="it is infinite, no number, or larger than 65504 somewhere: every step would overflow",
        hint="load weights that are finite, or use bf16",
    )

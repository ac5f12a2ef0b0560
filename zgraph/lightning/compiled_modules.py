"""The parts of a LightningModule, which are its compiled modules. The step that calls them stays Python."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zgraph.api.compiler import compile
from zgraph.errors import ModelError
from zgraph.lightning.dense_inputs import DenseInputs
from zgraph.plan.plan import Plan
from zgraph.runtime.compiled_models import is_compiled

SELF = "self"
"""In place of a path: the LightningModule itself, by its `forward`."""
_MARK = "_part_of_zgraph_lightning"  # the key of a part's __dict__ with the plan that it was compiled by


def compiled_modules(model: nn.Module, modules: str | Sequence[str] | None) -> dict[str, nn.Module]:
    """Return the modules to compile, by path: the named ones, or the outermost ones that have parameters and a forward.

    Raises `ModelError` for an unknown path, a part inside of another, a parameter that is in no part or in two, and modules
    that something else has compiled or wrapped.
    """
    _refuse_wrapped(model)
    if modules is None:
        parts = dict(_outermost(model))
    else:
        paths = [modules] if isinstance(modules, str) else list(modules)
        parts = {"" if path == SELF else path: _named(model, path) for path in paths}
        _refuse_nested(parts)
    _refuse_left_out(model, parts)
    return parts


def _outermost(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in model.named_children():
        if is_metric(child) or next(child.parameters(), None) is None:
            continue
        if has_forward(child):
            yield prefix + name, child
        else:  # (a ModuleList or ModuleDict, whose members are called)
            yield from _outermost(child, f"{prefix}{name}.")


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called."""
    return getattr(type(module).forward, "__name__", "") != "_forward_unimplemented"


def is_metric(module: nn.Module) -> bool:
    """Return whether a module is one of torchmetrics', which keeps its own state and is not compiled."""
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(module, library.Metric | library.MetricCollection)


def _named(model: nn.Module, path: str) -> nn.Module:
    try:
        module = model if path == SELF else model.get_submodule(path)
    except AttributeError:
        children = ", ".join(name for name, _ in model.named_children())
        raise ModelError(
            f"the LightningModule has no module {path!r}",
            where="modules of ZGraphStrategy",
            hint=f"its children are {children}; {SELF!r} is the LightningModule itself, by its forward",
        ) from None
    base = next(c for c in type(module).__mro__ if "forward" in vars(c))
    if not has_forward(module) or base.__name__ == "LightningModule":  # (whose own is that of no model)
        raise ModelError(
            f"{type(module).__name__} has no forward to compile",
            where="modules of ZGraphStrategy",
            hint="name modules that training_step calls; or write forward, and let training_step call self(…)",
        )
    return module


def _refuse_nested(parts: Mapping[str, nn.Module]) -> None:
    for path, part in parts.items():
        for other, inner in parts.items():
            if other != path and any(inner is m for m in part.modules()):
                raise ModelError(
                    f"{other!r} is inside of {path or SELF!r}, and both are to be compiled",
                    where="modules of ZGraphStrategy",
                    hint="name one of them",
                )


def _refuse_wrapped(model: nn.Module) -> None:
    """Raise `ModelError` for a module that something other than this strategy has compiled or wrapped."""
    for path, module in model.named_modules():
        name = type(module).__name__
        if name in ("OptimizedModule", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"):
            raise ModelError(
                f"{path or 'the model'} is wrapped already, in {name}",
                why="the strategy compiles it, and divides what it holds, by the plan",
                hint="give the LightningModule the plain module",
            )
        if is_compiled(module) and _MARK not in module.__dict__:
            raise ModelError(
                f"{path or 'the model'} is compiled already",
                why="ZGraphStrategy compiles the modules of a LightningModule itself",
                hint="leave zgraph.compile out; or keep it, and train with Lightning's ModelParallelStrategy",
            )


def _refuse_left_out(model: nn.Module, parts: Mapping[str, nn.Module]) -> None:
    """Raise `ModelError` for a parameter of no part, whose gradient would not be averaged, and for one of two parts,
    which would become two parameters."""
    holders: dict[int, list[str]] = {}
    for path, part in parts.items():
        for param in part.parameters():
            holders.setdefault(id(param), []).append(path or SELF)
    measured = {id(p) for module in model.modules() if is_metric(module) for p in module.parameters()}
    for name, param in model.named_parameters():
        paths = holders.get(id(param), [])
        if len(paths) > 1:
            raise ModelError(
                f"parameter {name!r} is in {paths[0]!r} and in {paths[1]!r}, which are compiled apart",
                why="each would get a copy of its own, and they would no longer be one parameter",
                hint=f"let one module hold both; or modules={SELF!r}, and let training_step call self(…)",
            )
        if not paths and id(param) not in measured:
            raise ModelError(
                f"parameter {name!r} is in no module that is compiled",
                why="the plan would neither divide it nor average its gradient over the ranks",
                hint=f"put it into a module whose forward reads it; or modules={SELF!r}, and let training_step call self(…)",
            )
    if not holders:
        raise ModelError(
            "the LightningModule has no module with parameters",
            why="there is nothing to compile",
            hint="make the modules in __init__ or configure_model",
        )


def compile_modules(parts: Mapping[str, nn.Module], plan: Plan, device: torch.device, world: int) -> DeviceMesh:
    """Compile the parts over one mesh and return the mesh.

    Parts that this function has compiled by the same plan before stay as they are. Raises `ModelError` for one that was
    compiled by another plan, and what `zgraph.compile` raises.
    """
    sizes = plan.resolve_mesh(world)
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for path, part in parts.items():
        before: Any = part.__dict__.get(_MARK)
        if before is None:
            compile(part, plan, mesh=mesh)
            part.__dict__[_MARK] = plan
            DenseInputs(part)
        elif before != plan:
            raise ModelError(
                f"{path or SELF!r} is compiled by another plan already",
                why="another strategy object has trained or evaluated this LightningModule",
                hint="use the same plan, or a LightningModule made anew from a checkpoint",
            )
    return mesh

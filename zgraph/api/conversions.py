"""`to`, `half`, `cuda` and their like on a compiled model, or on a module in it: they change nothing, or are refused.

Programs are compiled for the dtype and device of each weight and buffer. torch would change these under them; and where weights are
divided it swaps every one for a copy, also where nothing is to change, which fails as soon as anything else holds it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zgraph.errors import ModelError
from zgraph.program.tolerance import same_bits
from zgraph.runtime.compiled_models import is_compiled, owner_of
from zgraph.torch_compat.dtensors import local_of

_APPLY = "_apply"  # what all of torch's conversions of a module call, with what they do to each tensor
_Change = Callable[[torch.Tensor], torch.Tensor]


def watch_conversions(model: nn.Module, divided: bool) -> None:
    """Refuse conversions of a compiled model that would change a weight or a buffer, and those of every module in it if weights are
    divided. (A part of any other can be pickled, and read where zgraph is not installed; what is changed there, the next call tells.)"""
    for module in model.modules() if divided else (model,):
        if _APPLY not in module.__dict__:
            module.__dict__[_APPLY] = functools.partial(_apply, module)


def unwatch_conversions(model: nn.Module) -> None:
    """Undo `watch_conversions`."""
    for module in model.modules():
        if getattr(module.__dict__.get(_APPLY), "func", None) is _apply:
            del module.__dict__[_APPLY]


def change_by(module: nn.Module, change: _Change) -> str | None:
    """Describe the first weight or buffer that a conversion would change; None if it would change none. No weight is touched."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_meta:  # (a weight of another stage's ranks)
            continue
        probe = _probe_of(tensor)
        changed = change(probe)
        if (changed is probe or _is_like(changed, probe)) and not (changed.is_shared() and probe.device.type == "cpu"):
            continue
        there = f"{changed.dtype} on {changed.device}"
        if changed is probe:
            there = "in shared memory"
        elif (changed.dtype, changed.device) == (probe.dtype, probe.device):
            there = "another tensor, or in another memory format"
        return f"{name} is {tensor.dtype} on {tensor.device}, and would be {there}"
    return None


def _apply(module: nn.Module, change: _Change, recurse: bool = True) -> nn.Module:
    model = module if is_compiled(module) else _compiled_around(module)
    if (
        model is None or model.__dict__["zgraph"].whole is not None
    ):  # (a copy of the part; or the weights are whole for now)
        return _plainly(module, change, recurse)
    said = change_by(module, change)
    if said is None:
        return module
    raise ModelError(
        f"a compiled model's weights and buffers can't be moved or cast: {said}",
        why="its programs are compiled for where and what they are",
        hint="move and cast the model before zgraph.compile; or Plan(precision=…). Whole weights to take elsewhere: "
        "zgraph.full_state_dict, model.save_pretrained",
    )


def _is_like(changed: torch.Tensor, probe: torch.Tensor) -> bool:
    """Return whether a conversion made a copy alone, as one to the device "cpu:0" does, which accelerate names so."""
    same = (changed.dtype, changed.device, changed.shape) == (probe.dtype, probe.device, probe.shape)
    return same and changed.stride() == probe.stride() and not changed.is_pinned() and same_bits(changed, probe)


def _probe_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a small tensor of the same dtype, device, number of dimensions and order of these."""
    probe = torch.ones((2,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)
    own = local_of(tensor)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if last is not None and own.is_contiguous(memory_format=last) and not own.is_contiguous():
        return probe.to(memory_format=last)
    return probe


def _compiled_around(module: nn.Module) -> nn.Module | None:
    """Return the compiled model that has the weights of this module."""
    first = next(module.parameters(), None)
    return None if first is None else owner_of(first)


def _plainly(module: nn.Module, change: _Change, recurse: bool) -> Any:
    """Run the conversion of the module's own class, on the modules in it too."""
    ours = {
        m: m.__dict__.pop(_APPLY) for m in module.modules() if getattr(m.__dict__.get(_APPLY), "func", None) is _apply
    }
    try:
        return module._apply(change, recurse)
    finally:
        for each, mine in ours.items():
            each.__dict__[_APPLY] = mine

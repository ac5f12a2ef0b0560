"""What a module has registered, found by one walk over its own tables: torch's generators walk once for each question,
at every call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn


class Registered(NamedTuple):
    """What a module has registered, in torch's order, each once, by its first name."""

    modules: list[nn.Module]  # the module and all those inside it
    parameters: dict[str, nn.Parameter]  # all their parameters, by name
    buffers: list[torch.Tensor]  # all their buffers


def registered(module: nn.Module) -> Registered:
    """Return in one walk what `modules()`, `named_parameters()` and `buffers()` give."""
    members = Registered([], {}, [])
    if (
        type(module).named_parameters is not nn.Module.named_parameters
    ):  # (a class with a `named_parameters` of its own)
        members.parameters.update(module.named_parameters())
        _walk(module, "", members._replace(parameters={}), set())
    else:
        _walk(module, "", members, set())
    return members


def _walk(module: nn.Module, prefix: str, registered: Registered, seen: set[int]) -> None:
    seen.add(id(module))
    registered.modules.append(module)
    for key, param in module._parameters.items():
        if param is not None and id(param) not in seen:
            seen.add(id(param))
            registered.parameters[prefix + key] = param
    for buffer in module._buffers.values():
        if buffer is not None and id(buffer) not in seen:
            seen.add(id(buffer))
            registered.buffers.append(buffer)
    for key, child in module._modules.items():
        if child is not None and id(child) not in seen:
            _walk(child, f"{prefix}{key}.", registered, seen)

"""State dicts of compiled modules and of their optimizers as Lightning's files hold them: whole tensors, under the plain model's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zgraph.api.full_state_dict import as_cut, full_tensors


def whole_state(model: nn.Module, parts: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return the model's state dict with whole tensors on rank 0, and {} on the others. All ranks must call it."""
    return full_tensors(list(parts.values()), model.state_dict(), ranks=[0])


def cut_state(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of whole tensors with each tensor sharded as the model's own."""
    own_state = model.state_dict(keep_vars=True)
    return {
        name: as_cut(value, own_state[name])
        if isinstance(own_state.get(name), DTensor) and not isinstance(value, DTensor)
        else value
        for name, value in state.items()
    }


def same_buffers(model: nn.Module, but: Iterable[nn.Module] = ()) -> None:
    """Copy rank 0's buffers to every rank, as DistributedDataParallel does, except those of the modules in `but`."""
    left = {id(b) for module in but for b in module.buffers()}
    for buffer in model.buffers():
        if id(buffer) not in left:
            dist.broadcast(buffer, 0)

"""Refuses shards of another rank when they are loaded: rank 0's file, read by all ranks, would give each the rows of
rank 0. Whole tensors for weights that are sharded are refused too, with a clearer error than torch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zgraph.errors import ModelError
from zgraph.torch_compat.dtensors import shard_of_another_rank


def refuse_foreign(tensors: Mapping[str, Any]) -> None:
    """Raise `ModelError` if one of these tensors is a shard that another rank has pickled."""
    for name, value in tensors.items():
        theirs = shard_of_another_rank(value)
        if theirs is not None:
            raise ModelError(
                f"{name!r} is the shard of another rank, at {list(theirs)} of the mesh",
                why="a state dict has each rank's own shards, and torch.save writes those of the rank that calls it",
                hint="model.save_checkpoint; or save a file for each rank, or zgraph's or torch.distributed.checkpoint's full state dict",
            )


def watch_loads(model: nn.Module) -> None:
    """Let `load_state_dict` of a model, and of each module in it, refuse shards of other ranks and whole tensors before
    anything is loaded.
    """
    for module in model.modules():
        if not any(getattr(h, "hook", None) is _before_load for h in module._load_state_dict_pre_hooks.values()):
            module.register_load_state_dict_pre_hook(_before_load)


def _before_load(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *rest: Any
) -> None:
    refuse_foreign({n: v for n, v in state_dict.items() if n.startswith(prefix)})
    if metadata.get("assign_to_params_buffers"):  # (an assigned tensor is checked at the next call)
        return
    for key, param in module._parameters.items():
        value = state_dict.get(prefix + key)
        if isinstance(param, DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            raise ModelError(
                f"{prefix + key!r} is a whole tensor, and the compiled model has a part of it",
                why="load_state_dict of a compiled model takes the shards that its own state_dict() has",
                hint="model.load_checkpoint(folder); or load it inside zgraph.full_weights(model, write=True)",
            )

"""Shards of another rank are refused where they are loaded: rank 0's file, read by all, would give each rank the rows of rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from zgraph.errors import ModelError
from zgraph.torch_compat.dtensors import shard_of_another_rank


def refuse_foreign(tensors: Mapping[str, Any]) -> None:
    """Raise `ModelError` if one of these is a shard that another rank has pickled."""
    for name, value in tensors.items():
        theirs = shard_of_another_rank(value)
        if theirs is not None:
            raise ModelError(
                f"{name!r} is the shard of another rank, at {list(theirs)} of the mesh",
                why="a state dict has each rank's own shards, and torch.save writes those of the rank that calls it",
                hint="model.save_checkpoint; or save a file for each rank, or zgraph's or torch.distributed.checkpoint's full state dict",
            )


def watch_loads(model: nn.Module) -> None:
    """Let `load_state_dict` of a model, and of each module in it, refuse the shards of other ranks before anything is loaded."""
    for module in model.modules():
        if not any(getattr(h, "hook", None) is _before_load for h in module._load_state_dict_pre_hooks.values()):
            module.register_load_state_dict_pre_hook(_before_load)


def _before_load(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
    refuse_foreign({n: v for n, v in state_dict.items() if n.startswith(prefix)})

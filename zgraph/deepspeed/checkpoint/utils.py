"""Copies of tensors for `torch.save`."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zgraph.errors import UnsupportedError


def clone_tensors_for_torch_save(item: Any, device: str | torch.device = "cpu") -> Any:
    """Return a tensor, or lists, tuples and dicts of tensors, with each tensor copied to a device.

    Raises `UnsupportedError` for a shard: the file would have this rank's part of it alone.
    """
    if isinstance(item, DTensor):
        raise UnsupportedError(
            f"a shard of a parameter of shape {list(item.shape)} is not cloned for torch.save",
            why="a compiled model's state dict has this rank's rows, at every ZeRO stage",
            hint="engine.save_16bit_model(dir), engine.save_checkpoint(dir), or tensor.full_tensor() on all ranks",
        )
    if isinstance(item, torch.Tensor):
        copied = item.detach().to(device)
        return copied.clone() if copied.data_ptr() == item.data_ptr() else copied
    if isinstance(item, dict):
        return type(item)((k, clone_tensors_for_torch_save(v, device)) for k, v in item.items())
    if isinstance(item, (list, tuple)):
        return type(item)([clone_tensors_for_torch_save(v, device) for v in item])
    return item

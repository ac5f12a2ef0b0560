"""The functions of DeepSpeed's `zero_to_fp32`: whole fp32 weights from a checkpoint of zgraph's or DeepSpeed's. (`zgraph ckpt export` writes
safetensors.)"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from zgraph.checkpoint.detect_format import open_checkpoint
from zgraph.checkpoint.master_precision import is_current_in
from zgraph.checkpoint.source import MODEL, OPTIMIZER, Source
from zgraph.checkpoint.write_pretrained import export
from zgraph.deepspeed.full_values import load_whole
from zgraph.runtime.compiled_models import is_compiled
from zgraph.update.build_update import MASTER

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]

Path_ = str | os.PathLike[str]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Path_, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, torch.Tensor]:
    """Return the whole weights of a checkpoint, floating-point ones in float32, from their master weights if there are
    some.

    This process holds all of them. Raises `CheckpointError` if there is no checkpoint.
    """
    source = open_checkpoint(Path(checkpoint_dir), tag)
    trained = {name for group in source.known.groups for name in group["names"]}
    names = [name.removeprefix(MODEL) for name in source.tensors if name.startswith(MODEL)]
    if exclude_frozen_parameters and trained:
        names = [name for name in names if name in trained]
    return {name: _wide(source, name) for name in names}


def _wide(source: Source, name: str) -> torch.Tensor:
    master, held = f"{OPTIMIZER}{name}.{MASTER}", MODEL + name
    current = master in source.tensors and is_current_in(source, master, held)
    value = source.whole(master if current else held)
    return value.float() if value.is_floating_point() else value


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: Path_, tag: str | None = None) -> nn.Module:
    """Load a checkpoint's weights into a model and return it: a plain model is moved to the CPU, a compiled one
    (`engine.module`) loads its shards.

    All ranks must call it for a compiled model.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    if is_compiled(model):
        load_whole(model, state, strict=False)
        return model
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Path_,
    output_dir: Path_,
    max_shard_size: str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the whole fp32 weights: with `safe_serialization` as safetensors of at most `max_shard_size`, else as
    one `pytorch_model.bin`."""
    folder = Path(output_dir)
    if safe_serialization:
        export(
            open_checkpoint(Path(checkpoint_dir), tag), folder, dtype="fp32", max_shard_size=max_shard_size or 1 << 62
        )
        return
    folder.mkdir(parents=True, exist_ok=True)
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    made = folder / f"pytorch_model.bin.{os.getpid()}"  # (all ranks may write the same file)
    torch.save(state, made)
    made.replace(folder / "pytorch_model.bin")

"""The functions of DeepSpeed's `zero_to_fp32`: whole fp32 weights from a checkpoint of zgraph's or DeepSpeed's. (`zgraph ckpt export` writes
safetensors.)"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zgraph.checkpoint.detect_format import open_checkpoint
from zgraph.checkpoint.read_native import Checkpoint as NativeCheckpoint
from zgraph.checkpoint.source import MODEL, OPTIMIZER, Source
from zgraph.checkpoint.write_pretrained import dtype_of, export, masters_of_tied, size_of, widest
from zgraph.deepspeed.full_values import load_whole
from zgraph.deepspeed.utils.logging import no_effect
from zgraph.errors import CheckpointError
from zgraph.program.tolerance import same_bits
from zgraph.runtime.compiled_models import is_compiled

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]

Path_ = str | os.PathLike[str]

_ANY = 1 << 62  # bytes of a file, where its size is not limited


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Path_, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, torch.Tensor]:
    """Return the whole weights of a checkpoint, floating-point ones in float32, from their master weights if there are
    some. Tied weights are one tensor.

    This process holds all of them. Raises `CheckpointError` if there is no checkpoint.
    """
    source = open_checkpoint(Path(checkpoint_dir), tag)
    if lazy_mode:
        no_effect("lazy_mode", "weights are whole tensors, which zgraph ckpt export reads and writes one by one")
    names = _names(source, exclude_frozen_parameters)
    tied = _tied(source, names)
    state = {name: _wide(source, name) for name in names if name not in tied}
    return {name: state[tied.get(name, name)] for name in names}


def _names(source: Source, exclude_frozen_parameters: bool) -> list[str]:
    """Return the names of a checkpoint's weights and buffers, without frozen weights if that is asked for; then of one that zgraph did not
    write without buffers as well, which it does not tell from frozen weights.

    Raises `CheckpointError` if its optimizer has no states, which tell what trains.
    """
    names = [name.removeprefix(MODEL) for name in source.tensors if name.startswith(MODEL)]
    if not exclude_frozen_parameters:
        return names
    trained = {n.removeprefix(OPTIMIZER).rpartition(".")[0] for n in source.tensors if n.startswith(OPTIMIZER)}
    if not trained:
        raise CheckpointError(
            "the checkpoint does not say which weights are frozen",
            where=str(source.folder),
            why="it has no states of an optimizer",
            hint="take all weights",
        )
    if not isinstance(source, NativeCheckpoint):
        return [name for name in names if name in trained]
    frozen = {name for group in source.known.groups for name in group["names"]} - trained
    return [name for name in names if name not in frozen]


def _wide(source: Source, name: str) -> torch.Tensor:
    """Return a weight in float32: of its fp32 master, unless a script has changed the weight since."""
    value = source.whole(widest(source, name, torch.float32, []))
    return value.float() if value.is_floating_point() else value


def _tied(source: Source, names: Sequence[str]) -> dict[str, str]:
    """Return the name under which a tied weight trains for each other name of it: a checkpoint has the weight under all, and what its
    optimizer keeps under one."""
    twins = masters_of_tied(source, names)
    trained = {name for group in source.known.groups for name in group["names"]}
    for name in names:
        if trained and name not in trained and name not in twins:
            info, own = source.tensors[MODEL + name], source.whole(MODEL + name)
            alike = (n for n in names if n in trained and source.tensors[MODEL + n] == info)
            same = next((n for n in alike if same_bits(own, source.whole(MODEL + n))), None)
            if same is not None:
                twins[name] = same
    return twins


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


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: Path_,
    output_dir: Path_,
    dtype: str | torch.dtype = torch.float32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the whole weights, floating-point ones in `dtype`, into files of at most `max_shard_size`: with
    `safe_serialization` safetensors, else `pytorch_model.bin`, or numbered ones with an index.

    Raises `CheckpointError` if there is no checkpoint, and for what is no dtype or size.
    """
    folder = Path(output_dir)
    wanted, most = dtype_of(dtype), size_of(_ANY if max_shard_size is None else max_shard_size)
    if safe_serialization:
        source = open_checkpoint(Path(checkpoint_dir), tag)
        names = set(_names(source, exclude_frozen_parameters))
        source.tensors = {
            n: t for n, t in source.tensors.items() if not n.startswith(MODEL) or n.removeprefix(MODEL) in names
        }
        export(source, folder, dtype=wanted, max_shard_size=most)
        return
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    cast = {id(v): v.to(wanted) if v.is_floating_point() else v for v in state.values()}  # (tied ones stay one tensor)
    state = {n: cast[id(v)] for n, v in state.items()}
    parts: list[dict[str, torch.Tensor]] = [{}]
    for name, value in state.items():
        if parts[-1] and sum(v.nbytes for v in parts[-1].values()) + value.nbytes > most:
            parts.append({})
        parts[-1][name] = value
    folder.mkdir(parents=True, exist_ok=True)
    files = [f"pytorch_model-{n:05}-of-{len(parts):05}.bin" for n in range(1, len(parts) + 1)]
    files = files if len(parts) > 1 else ["pytorch_model.bin"]
    for file, part in zip(files, parts, strict=True):
        _put(folder / file, lambda path, part=part: torch.save(part, path))  # type: ignore[misc]
    if len(parts) > 1:
        weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        index = {"metadata": {"total_size": sum(v.nbytes for v in state.values())}, "weight_map": weight_map}
        _put(folder / "pytorch_model.bin.index.json", lambda path: path.write_text(json.dumps(index, indent=2) + "\n"))


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Path_,
    output_dir: Path_,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the whole weights in fp32; see `convert_zero_checkpoint_to_state_dict`."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def _put(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file beside its place first: all ranks may write the same one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    write(temporary)
    temporary.replace(path)

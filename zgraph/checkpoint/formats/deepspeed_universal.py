"""DeepSpeed's universal checkpoints: a folder `zero/NAME` for each parameter, with a file for it and for each of its
states."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zgraph.checkpoint.formats.deepspeed_partitions import Read
from zgraph.checkpoint.formats.torchfile import Stored, TorchFile, number
from zgraph.checkpoint.tensorfile import damaged

FOLDER = "zero"
WEIGHT = "fp32"
COMMON = "optimizer_state.pt"


def universal(folder: Path, shapes: Sequence[Mapping[str, Any]], leave: set[str]) -> tuple[Read, list[TorchFile]]:
    """Read the folder `zero`; return what it holds, and its files. `shapes`: those of parameters, which may be saved
    flat; `leave`: names that are not read (buffers, which are written beside parameters). Raises `CheckpointError`."""
    read, files = Read(), []
    known = {name: tuple(shape) for group in shapes for name, shape in group.items()}
    for place in sorted(folder.iterdir()):
        if place.is_symlink() or not place.is_dir() or place.name in leave:
            continue
        for path in sorted(place.iterdir()):
            if path.suffix != ".pt":
                continue
            file = TorchFile(path)
            files.append(file)
            value = file.value["param"] if isinstance(file.value, dict) and "param" in file.value else file.value
            if path.stem == "step":
                step = number(value, "step")
                if step is None:
                    damaged(path, "it is no number")
                read.states[place.name, "step"] = torch.tensor(float(step))
            elif isinstance(value, Stored):
                shaped = _shaped(value, known.get(place.name), path)
                if path.stem == WEIGHT:
                    read.weights[place.name] = shaped
                else:
                    read.states[place.name, path.stem] = shaped
            else:
                damaged(path, "it is no tensor")
    _complete_steps(read, folder / COMMON)
    return read, files


def _shaped(stored: Stored, shape: tuple[int, ...] | None, path: Path) -> Stored:
    if shape is None or stored.shape == shape:
        return stored
    if math.prod(shape) != stored.elements or not stored.in_rows:
        damaged(path, f"it is {list(stored.shape)}, and the parameter {list(shape)}")
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    return dataclasses.replace(stored, shape=shape, strides=tuple(strides))


def _complete_steps(read: Read, path: Path) -> None:
    """Add the counts of updates that ZeRO stage 3 saves in no parameter's folder, but once in the file for all, if all
    of its counts agree."""
    without = {n for n, key in read.states if key != "step"} - {n for n, key in read.states if key == "step"}
    if not without or not path.exists():
        return
    common = TorchFile(path).value
    optimizer = (
        common.get("optimizer_state_dict", common.get("base_optimizer_state")) if isinstance(common, dict) else None
    )
    states = optimizer.get("state", {}) if isinstance(optimizer, dict) else {}
    steps = {number(s.get("step"), "step") for s in states.values() if isinstance(s, dict)} - {None}
    if len(steps) == 1:
        for name in without:
            read.states[name, "step"] = torch.tensor(float(steps.copy().pop() or 0.0))

"""The partitions that DeepSpeed's ZeRO cuts parameters and states into, and which elements of a parameter each has.

Stages 1 and 2 (Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models") lay
the parameters of a group end to end, pad the whole, and give each rank an equal part: a parameter may begin on one rank
and end on the next. Stage 3 cuts each parameter, padded, into equal parts, and each rank stores its own parts end to
end, in sub-groups. States are cut as the weights are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from zgraph.checkpoint.formats.torchfile import Stored, number, plain_group
from zgraph.errors import CheckpointError

PADDED_TO = 2  # a group is padded to a multiple of this times the number of ranks, in elements


class StoredTensor(Protocol):
    """A tensor of a checkpoint that is read only when asked for."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def read(self) -> torch.Tensor: ...
    def rows(self, first: int, count: int) -> torch.Tensor: ...


@dataclass(frozen=True)
class Gathered:
    """A tensor whose elements, in row-major order, are parts of other tensors, one after another."""

    dtype: torch.dtype  # its dtype
    shape: tuple[int, ...]  # its shape
    parts: tuple[tuple[Stored, int, int], ...]  # (tensor, first element, number of elements) of each part

    def read(self) -> torch.Tensor:
        """Read all of it. Raises `CheckpointError`."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self._read_into(tensor.view(-1), 0)
        return tensor

    def rows(self, first: int, count: int) -> torch.Tensor:
        """Read `count` of its rows (of dimension 0) from row `first` on. Raises `CheckpointError`."""
        tensor = torch.empty((count, *self.shape[1:]), dtype=self.dtype)
        self._read_into(tensor.view(-1), first * math.prod(self.shape[1:]))
        return tensor

    def _read_into(self, target: torch.Tensor, begin: int) -> None:
        """Fill a 1-d tensor with its elements from `begin` on."""
        at, end = 0, begin + target.numel()
        for stored, first, count in self.parts:
            low, high = max(at, begin), min(at + count, end)
            if low < high:
                stored.read_into(target[low - begin : high - begin], first + low - at)
            at += count


@dataclass
class Read:
    """The tensors that a checkpoint holds of a model, by the names of parameters."""

    weights: dict[str, StoredTensor] = field(default_factory=dict)  # the weights, by parameter
    # the optimizer's states by (parameter, key); the counts "step" are tensors in memory
    states: dict[tuple[str, str], StoredTensor | torch.Tensor] = field(default_factory=dict)
    # each parameter group's options, and its parameters as "names"
    groups: list[dict[str, Any]] = field(default_factory=list)


def first_stages(shapes: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]], path: Path) -> Read:
    """Return what a checkpoint of ZeRO stage 1 or 2 holds. `shapes`: those of each parameter group; `ranks`: each
    rank's optimizer state. Raises `CheckpointError`."""
    read, world = Read(), len(ranks)
    for index, group in enumerate(shapes):
        flats = [_flat(rank["single_partition_of_fp32_groups"][index], path) for rank in ranks]
        states = [_state(rank["base_optimizer_state"], index, path) for rank in ranks]
        part = flats[0].elements if world > 1 else _total(flats) + PADDED_TO
        paddings = ranks[0].get("param_alignment_paddings")
        gaps = [0] * len(group) if paddings is None else list(paddings[index])
        keyed = {key: [_flat(s.get(key), path) for s in states] for key in _keys(states[0], flats[0].elements)}
        at = 0
        for (name, shape), gap in zip(group.items(), gaps, strict=True):
            read.weights[name] = _straddling(name, shape, at, part, flats, path)
            for key, tensors in keyed.items():
                if world > 1 and tensors[0].elements != part:
                    _misfit(name, path)
                read.states[name, key] = _straddling(name, shape, at, part, tensors, path)
            at += math.prod(shape) + gap
        if not 0 <= _total(flats) - at < PADDED_TO * world:
            _misfit(list(group)[-1] if group else "a group", path)
        described = ranks[0]["base_optimizer_state"]["param_groups"][index]
        _note_steps(read, group, [_step(s, r, index) for s, r in zip(states, ranks, strict=True)], path)
        read.groups.append({"names": list(group)} | plain_group(described))
    return read


def third_stage(shapes: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]], path: Path) -> Read:
    """Return what a checkpoint of ZeRO stage 3 holds. `shapes`: those of each sub-group; `ranks`: each rank's optimizer
    state. Raises `CheckpointError`."""
    read, world = Read(), len(ranks)
    described = ranks[0]["optimizer_state_dict"]["param_groups"]
    group_of = [g for g, group in enumerate(described) for _ in group["params"]]
    read.groups = [{"names": []} | plain_group(group) for group in described]
    if len({len(shapes), *(len(r["fp32_flat_groups"]) for r in ranks), len(group_of)}) > 1:
        raise CheckpointError("ranks have other sub-groups of parameters than the model", where=str(path))
    for index, group in enumerate(shapes):
        flats = [_flat(rank["fp32_flat_groups"][index], path) for rank in ranks]
        states = [_state(rank["optimizer_state_dict"], index, path) for rank in ranks]
        keyed = {key: [_flat(s.get(key), path) for s in states] for key in _keys(states[0], flats[0].elements)}
        at = 0
        for name, shape in group.items():
            read.weights[name] = in_equal_parts(name, shape, flats, path, at)
            for key, tensors in keyed.items():
                read.states[name, key] = in_equal_parts(name, shape, tensors, path, at)
            at += -(-math.prod(shape) // world)
        if any(f.elements != at for f in flats):
            _misfit(list(group)[-1] if group else "a group", path)
        _note_steps(read, group, [number(s.get("step"), "step") for s in states], path)
        read.groups[group_of[index]]["names"] += list(group)
    return read


def in_equal_parts(name: str, shape: Sequence[int], flats: Sequence[Stored], path: Path, at: int = 0) -> Gathered:
    """Return a parameter of which every rank has an equal part, the last padded, that begins at element `at` of the
    rank's tensor."""
    total = math.prod(shape)
    each = -(-total // len(flats))
    parts = [(flat, at, max(0, min(each, total - rank * each))) for rank, flat in enumerate(flats)]
    return _gathered(name, shape, parts, path)


def _straddling(name: str, shape: Sequence[int], at: int, part: int, flats: Sequence[Stored], path: Path) -> Gathered:
    """Return a parameter that begins at element `at` of all ranks' tensors end to end, `part` elements each."""
    end = at + math.prod(shape)
    spans = [(max(at, r * part), min(end, (r + 1) * part), flat) for r, flat in enumerate(flats)]
    parts = [(flat, low - r * part, high - low) for r, (low, high, flat) in enumerate(spans) if low < high]
    return _gathered(name, shape, parts, path)


def _gathered(name: str, shape: Sequence[int], parts: list[tuple[Stored, int, int]], path: Path) -> Gathered:
    filled = tuple(p for p in parts if p[2])
    if any(first + count > flat.elements for flat, first, count in filled):
        _misfit(name, path)
    if sum(count for _, _, count in filled) != math.prod(shape) or len({p[0].dtype for p in filled}) > 1:
        _misfit(name, path)
    dtype = filled[0][0].dtype if filled else torch.float32
    return Gathered(dtype, tuple(shape), filled)


def _flat(value: Any, path: Path) -> Stored:
    if not isinstance(value, Stored) or len(value.shape) != 1 or not value.in_rows:
        raise CheckpointError("a partition is no flat tensor", where=str(path), why="ranks must hold the same states")
    return value


def _total(flats: Sequence[Stored]) -> int:
    return sum(f.elements for f in flats)


def _state(optimizer: Any, index: int, path: Path) -> Mapping[str, Any]:
    """Return what an optimizer keeps of the `index`-th of its tensors; nothing before its first step."""
    if not isinstance(optimizer, dict):
        raise CheckpointError(
            "the optimizer's states were saved with elastic_checkpoint",
            where=str(path),
            hint="save without it, or convert with DeepSpeed's ds_to_universal",
        )
    ids = [i for group in optimizer["param_groups"] for i in group["params"]]
    state = optimizer["state"].get(ids[index], {})
    if not isinstance(state, dict):
        raise ValueError("an optimizer's state is no table")
    return state


def _keys(state: Mapping[str, Any], least: int) -> Iterator[str]:
    """Yield the names of states with a number for each element."""
    for key, value in state.items():
        if key != "step" and isinstance(value, Stored) and len(value.shape) == 1 and value.elements >= least:
            yield key


def _step(state: Mapping[str, Any], rank: Mapping[str, Any], index: int) -> float | None:
    group = rank["base_optimizer_state"]["param_groups"][index]
    for value in (state.get("step"), group.get("step"), rank.get("base_optimizer_state_step")):
        step = number(value, "step")
        if step is not None:
            return step
    return None


def _note_steps(read: Read, names: Mapping[str, Any], steps: list[float | None], path: Path) -> None:
    if len(set(steps)) > 1:
        raise CheckpointError(
            "ranks' files are of different steps",
            where=str(path),
            why=f"their optimizers have taken {', '.join(str(s) for s in steps[:8])}",
            hint="load another checkpoint",
        )
    if steps[0] is not None:
        for name in names:
            read.states[name, "step"] = torch.tensor(float(steps[0]))


def _misfit(name: str, path: Path) -> None:
    raise CheckpointError(
        f"the partitions of {name} do not fit its shape",
        where=str(path),
        why="files of several checkpoints may lie in one folder, or one was written by a DeepSpeed that cuts in another way",
        hint="load another checkpoint, or convert this one with DeepSpeed's ds_to_universal",
    )

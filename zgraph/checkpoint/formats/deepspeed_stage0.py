"""DeepSpeed's checkpoints without ZeRO: the module's own state dict, and an optimizer's, which numbers the parameters.

The optimizer's part has no names. Within each group its parameters are in the order of the model, so the shapes of the
states determine the names if only one assignment fits. Where several fit, the checkpoint is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zgraph.checkpoint.formats.deepspeed_partitions import Read
from zgraph.checkpoint.formats.torchfile import Stored, number, plain_group
from zgraph.errors import CheckpointError

logger = logging.getLogger(__name__)

MOST_WAYS = 100_000  # partial assignments that are kept at most


def unsharded(weights: Mapping[str, Stored], saved: Mapping[str, Any] | None, path: Path) -> Read:
    """Return what a checkpoint without ZeRO holds. `weights`: the module's parameters in its order, each once; `saved`:
    the optimizer's part. Raises `CheckpointError`."""
    read = Read(dict(weights))
    if saved is None:
        return read
    optimizer = saved.get("optimizer_state_dict", saved)
    masters = saved.get("fp32_groups")
    if "fp32_groups_flat" in saved:
        raise CheckpointError(
            "a checkpoint of half precision without ZeRO",
            where=str(path),
            why="its optimizer's states are one tensor, and what lies where in it is not saved",
            hint="save it at ZeRO stage 1",
        )
    groups: list[list[Any]] = [list(group["params"]) for group in optimizer["param_groups"]]
    shapes = [[_shape(optimizer["state"].get(i, {})) for i in ids] for ids in groups]
    placed = _placed(list(weights), [w.shape for w in weights.values()], shapes, path)
    logger.warning(
        "%s: DeepSpeed saved no names of the optimizer's parameters: they are taken in the model's order", path
    )
    for index, (ids, names) in enumerate(zip(groups, placed, strict=True)):
        described = optimizer["param_groups"][index]
        read.groups.append({"names": names} | plain_group(described))
        for i, name in zip(ids, names, strict=True):
            state = optimizer["state"].get(i, {})
            step = number(state.get("step", described.get("step")), "step")
            if step is not None:
                read.states[name, "step"] = torch.tensor(step)
            for key, value in state.items():
                if key != "step" and isinstance(value, Stored):
                    read.states[name, key] = value
        if masters is not None:
            _take_masters(read, names, masters[index], weights, path)
    return read


def _shape(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of an optimizer's states of one parameter; None if it has none, or several shapes."""
    shapes = {v.shape for k, v in state.items() if k != "step" and isinstance(v, Stored) and v.shape}
    return next(iter(shapes)) if len(shapes) == 1 else None


def _placed(
    names: Sequence[str], have: Sequence[tuple[int, ...]], groups: list[list[tuple[int, ...] | None]], path: Path
) -> list[list[str]]:
    """Return the names of each group's parameters, by the one assignment that fits the shapes. A partial assignment is
    keyed by how many parameters each group has been given; its value is the number of ways to reach it, and the last
    choice. Parameters that no group is given are frozen. Raises `CheckpointError` unless exactly one assignment
    fits."""
    frozen = len(names) - sum(map(len, groups))
    ways: dict[tuple[int, ...], tuple[int, tuple[Any, ...] | None]] = {(0,) * len(groups): (1, None)}
    for place, shape in enumerate(have):
        following: dict[tuple[int, ...], tuple[int, tuple[Any, ...] | None]] = {}
        for taken, (count, before) in ways.items():
            if place - sum(taken) < frozen:
                _add(following, taken, count, before)
            for g, wanted in enumerate(groups):
                if taken[g] < len(wanted) and wanted[taken[g]] in (None, shape):
                    after = (*taken[:g], taken[g] + 1, *taken[g + 1 :])
                    _add(following, after, count, (before, g, names[place]))
        ways = following
        if len(ways) > MOST_WAYS:
            break
    count, last = ways.get(tuple(map(len, groups)), (0, None))
    if count != 1:
        raise CheckpointError(
            "it can't be known which parameter each of the optimizer's states is of",
            where=str(path),
            why="DeepSpeed saves no names without ZeRO, and "
            + (
                "the shapes allow several ways" if count or len(ways) > MOST_WAYS else "no order of them fits the model"
            ),
            hint="save it at ZeRO stage 1, or convert it with DeepSpeed's tools",
        )
    names_by_group: list[list[str]] = [[] for _ in groups]
    while last is not None:
        last, g, name = last
        names_by_group[g].insert(0, name)
    return names_by_group


def _add(
    ways: dict[tuple[int, ...], tuple[int, tuple[Any, ...] | None]],
    taken: tuple[int, ...],
    count: int,
    last: tuple[Any, ...] | None,
) -> None:
    ways[taken] = (ways[taken][0] + count, None) if taken in ways else (count, last)


def _take_masters(read: Read, names: list[str], masters: Any, weights: Mapping[str, Stored], path: Path) -> None:
    """Take the weights of a group in float32. Raises `CheckpointError` unless each rounds to the module's own."""
    for name, master in zip(names, masters, strict=True):
        mine = weights[name]
        if not isinstance(master, Stored) or master.shape != mine.shape:
            raise CheckpointError(f"{name} in float32 has another shape", where=str(path))
        if not torch.equal(master.read().to(mine.dtype), mine.read()):
            raise CheckpointError(
                f"{name} in float32 is not what it is in {mine.dtype}",
                where=str(path),
                why="the optimizer's order is not the model's",
                hint="save it at ZeRO stage 1",
            )
        read.weights[name] = master

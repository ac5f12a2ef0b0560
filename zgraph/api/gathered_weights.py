"""Checks that a compiled model's weights can be gathered now."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from zgraph.errors import ModelError, PlanError, UnsupportedError, refuse_unless
from zgraph.plan.communication import parse_bytes
from zgraph.runtime.compiled_models import is_compiled

if TYPE_CHECKING:
    from zgraph.runtime.runtime import Runtime


def handle_of(model: nn.Module) -> Any:
    """Return `model.zgraph`. Raises `ModelError` for a model that is not compiled."""
    if not is_compiled(model):
        raise ModelError(
            f"{type(model).__name__} is no compiled model",
            why="its weights are whole, or it holds the compiled model, or is a part of one",
            hint="give the very module that zgraph.compile was given",
        )
    return model.__dict__["zgraph"]


def ready(model: nn.Module, what: str) -> Runtime:
    """Return the runtime of a model whose weights can be gathered, after pending updates. All ranks must call it.

    Raises `UnsupportedError` for a model in stages.
    """
    handle = handle_of(model)
    runtime: Runtime = handle.runtime
    if runtime.held is not None:
        raise UnsupportedError(
            f"{what} can't be had of a pipeline",
            where="mesh.pp",
            why="each rank holds the weights of its own stages",
            hint="model.save_pretrained(folder), from which a plain model is loaded",
        )
    runtime.updater.finish()
    runtime.shards.refresh()
    runtime.refuse_unset()
    runtime.updater.rounds.tell(what)
    return runtime


def ranks_of(runtime: Runtime, ranks: Collection[int] | None) -> list[int] | None:
    """Return the global numbers of the ranks that need what is gathered, in order; None for all.

    Raises `PlanError` for numbers that are no ranks', or none.
    """
    if ranks is None:
        return None
    whole = isinstance(ranks, Collection) and all(isinstance(rank, int) for rank in ranks)
    refuse_unless(whole, "ranks=…", ranks, "a list of ranks' numbers, or None", hint="ranks=[0], say")
    world = dist.get_world_size() if runtime.everyone.ranks else 1
    chosen = sorted(set(ranks))
    if not chosen or not set(chosen) <= set(range(world)):
        raise PlanError(
            f"ranks={list(ranks)} are not of the {world} ranks here",
            where="ranks",
            hint=f"global numbers from 0 to {world - 1}, at least one",
        )
    return None if len(chosen) == world else chosen


def bytes_of(value: int | str) -> int:
    size = parse_bytes(value)
    if type(size) is not int or size < 1:
        raise PlanError(f"max_bytes={value!r} is no size", hint='a number and a unit: "256MiB"')
    return size

"""Counts the steps that torch's optimizers make on sharded parameters, and refuses those of LBFGS.

A foreach operator on DTensors bumps no version, so nothing on a parameter shows that an optimizer has stepped. Nor does
a parameter learn that an optimizer takes it: an optimizer may be made, or given a parameter group, at any time. What
torch offers is a hook on the steps of all optimizers. It is registered only while a sharded model lives, and changes
nothing for optimizers without parameters of one.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zgraph.errors import ModelError
from zgraph.torch_compat.operators_of_shards import is_divided, is_of_a_model

_STEPS = "_zgraph_steps"  # in the __dict__ of a sharded parameter: steps of torch's optimizers on it


def steps_on(param: torch.Tensor) -> int:
    """Return how many steps torch's optimizers have made on a parameter since it was first counted."""
    return int(param.__dict__.get(_STEPS, 0))


def count_steps_on(param: torch.Tensor) -> None:
    """Count the steps on a parameter, while a model is watched (see `watch_optimizers`)."""
    param.__dict__.setdefault(_STEPS, 0)


def watch_optimizers(owner: Any) -> None:
    """Count steps while `owner`, which holds the shards of a model, lives."""
    _Hook.owners += 1
    if not _Hook.handles:
        _Hook.handles = (
            register_optimizer_step_pre_hook(_refuse_one_vector),
            register_optimizer_step_post_hook(_count_step),
        )
    weakref.finalize(owner, _unwatch).atexit = False


class _Hook:
    """The hooks of this process, and how many models need them."""

    owners = 0
    handles: tuple[Any, ...] = ()


def _unwatch() -> None:
    _Hook.owners -= 1
    if not _Hook.owners:
        for handle in _Hook.handles:
            handle.remove()
        _Hook.handles = ()


def _refuse_one_vector(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise `ModelError` for LBFGS on divided parameters."""
    if not isinstance(optimizer, torch.optim.LBFGS):
        return
    params = optimizer.param_groups[0]["params"]
    if any(isinstance(p, DTensor) and is_divided(p) and is_of_a_model(p) for p in params):
        raise ModelError(
            f"{type(optimizer).__name__} can't update weights that are divided over the ranks",
            why="it makes one vector of all weights, which torch's DTensors have no operators for",
            hint="zero=0 in the plan, with which each rank has whole weights; or another optimizer",
        )


def _count_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, "counts_updates", False):  # (a plan's optimizer counts its own)
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if _STEPS in param.__dict__:
                param.__dict__[_STEPS] += 1

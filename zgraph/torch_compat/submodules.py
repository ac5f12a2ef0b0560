"""Errors for misuse of modules inside a compiled model, whose weights are shards: say what to do, in place of torch's
error about DTensors."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.tensor import DTensor

from zgraph.errors import ModelError

CALLED = "was called, and not by the model's forward"
_CALL = "_compiled_call_impl"  # what `nn.Module.__call__` looks up first; captures do not


def watch(model: nn.Module) -> None:
    """Refuse calls of every module inside the model whose weights are sharded, and `fully_shard` of the model or any
    module in it."""
    for module in model.modules():
        module.__dict__.setdefault(STATE_KEY, NotForFSDP())
        if module is not model and module._parameters and module._compiled_call_impl is None:
            module.__dict__[_CALL] = functools.partial(_call, module)


def unwatch(model: nn.Module) -> None:
    """Undo `watch`."""
    for module in model.modules():
        if isinstance(module.__dict__.get(STATE_KEY), NotForFSDP):
            del module.__dict__[STATE_KEY]
        if getattr(module.__dict__.get(_CALL), "func", None) is _call:
            del module.__dict__[_CALL]


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    whole = bool(module._forward_pre_hooks)  # (a hook may gather its weights; if it does not, the call itself fails)
    if not whole and any(isinstance(p, DTensor) for p in module._parameters.values()):
        raise ModelError(
            f"a part of a compiled model ({type(module).__name__}) {CALLED}",
            why="its weights are divided over the ranks, and whole only in the model's own programs",
            hint="call the compiled model itself; or call the part inside zgraph.full_weights(model)",
        )
    return module._call_impl(*args, **kwargs)


class NotForFSDP(dict[Any, Any]):
    """A stand-in for the state that `fully_shard` looks up on a module first; looking it up raises ModelError."""

    def __contains__(self, key: object) -> bool:
        raise ModelError(
            "fully_shard was applied to a compiled model, or to a part of one",
            why="its weights are divided over the ranks by its plan",
            hint="leave fully_shard out: Plan(zero=3) divides weights, gradients and states as it does",
        )

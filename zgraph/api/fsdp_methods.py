"""Methods that scripts for FSDP2 call on a model (`torch.distributed.fsdp.FSDPModule`), on a compiled one.

Gathers, releases and reductions are nodes of its programs, so what says when they are to happen has nothing to do, and changes no number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from zgraph.errors import UnsupportedError
from zgraph.runtime.runtime import Runtime

METHODS = (
    "set_requires_gradient_sync",
    "set_is_last_backward",
    "set_reshard_after_forward",
    "set_reshard_after_backward",
    "unshard",
    "reshard",
)


def methods_of(runtime: Callable[[], Runtime]) -> dict[str, Callable[..., Any]]:
    """The methods, by name. `runtime` gives what runs the model now."""
    made: dict[str, Callable[..., Any]] = dict.fromkeys(METHODS, _nothing)
    made["set_requires_gradient_sync"] = functools.partial(_set_requires_gradient_sync, runtime)
    made["unshard"] = _unshard
    return made


def is_ours(method: Any) -> bool:
    """Whether it is one of these methods, and not a model's own."""
    return getattr(getattr(method, "func", method), "__module__", None) == __name__


def _set_requires_gradient_sync(
    runtime: Callable[[], Runtime], requires_gradient_sync: bool, *, recurse: bool = True
) -> None:
    """Let the backward passes from now on reduce their gradients, or only accumulate as inside `no_sync`.

    Raises `UnsupportedError` for a part of the model, `StepError` for a model in stages.
    """
    if not recurse:
        raise UnsupportedError(
            "set_requires_gradient_sync(…, recurse=False) is of one module's own parameters",
            why="all gradients of a backward are reduced, or none",
            hint="leave recurse out",
        )
    with runtime().no_sync():  # (which a model in stages refuses)
        pass
    runtime().accumulating = not requires_gradient_sync


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: a program gathers a weight in front of its first use, lets it go behind its last, and waits for reductions itself."""


class _Gathered:
    """What `unshard(async_op=True)` gives."""

    def wait(self) -> None:
        """Do nothing: there is nothing to wait for."""


def _unshard(async_op: bool = False) -> _Gathered | None:
    """Do nothing. Whole weights for other code are `zgraph.full_weights`'."""
    return _Gathered() if async_op else None

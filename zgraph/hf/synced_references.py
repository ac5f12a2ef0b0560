"""Moving TRL's reference model towards the trained one (`sync_ref_model`), which TRL's callback does with whole weights of both."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from zgraph.api.full_weights import full_weights

_CALLBACK = "SyncRefModelCallback"  # TRL's name


def sync_with_whole_weights(trainer: Any) -> None:
    """Let callbacks that read the trained model's weights into a reference model run with whole weights."""
    for callback in trainer.callback_handler.callbacks:
        kinds = [kind for kind in type(callback).__mro__ if kind.__module__.startswith("trl.")]
        if any(kind.__name__ == _CALLBACK for kind in kinds):
            callback.on_step_end = functools.partial(_on_step_end, trainer, callback.on_step_end)


def _on_step_end(trainer: Any, own: Callable[..., Any], args: Any, state: Any, control: Any, **more: Any) -> Any:
    if state.global_step % args.ref_model_sync_steps:
        return own(args, state, control, **more)
    with full_weights(trainer.model):
        return own(args, state, control, **more)

"""TRL's callbacks that read the trained model's weights: into a reference or teacher model, or into averages (BEMA). They get whole weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from zgraph.api.full_weights import full_weights
from zgraph.torch_compat.private_names import refuse_release

_SYNCED, _AVERAGING = "SyncRefModelCallback", "BEMACallback"  # TRL's names


def give_whole_weights(trainer: Any) -> None:
    """Let callbacks of TRL's that read the weights of a trainer's compiled model get whole ones."""
    for callback in trainer.callback_handler.callbacks:
        names = {kind.__name__ for kind in type(callback).__mro__ if kind.__module__.startswith("trl.")}
        if _SYNCED in names and "sync_target_model" not in callback.__dict__:
            refuse_release("callbacks of TRL")
            callback.sync_target_model = functools.partial(_sync, trainer, callback.sync_target_model)
        elif _AVERAGING in names and "on_step_end" not in callback.__dict__:
            refuse_release("callbacks of TRL")
            callback.on_train_begin = functools.partial(_average, trainer, callback, callback.on_train_begin)
            callback.on_step_end = functools.partial(_average_if_due, trainer, callback, callback.on_step_end)


def _sync(trainer: Any, own: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    with full_weights(trainer.model):
        own(*args, **kwargs)


def _average(trainer: Any, callback: Any, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a method of TRL's average of weights with whole weights in the list of those that it follows."""
    with full_weights(trainer.model) as model:
        callback.thetat_params = [p for name, p in model.named_parameters() if name in callback.param_names]
        try:
            return own(*args, **kwargs)
        finally:
            callback.thetat_params = []


def _average_if_due(
    trainer: Any, callback: Any, own: Callable[..., Any], args: Any, state: Any, control: Any, **more: Any
) -> Any:
    since = state.global_step - callback.update_after
    if since < 0 or since % callback.update_freq:
        return own(args, state, control, **more)  # (it reads no weights)
    return _average(trainer, callback, own, args, state, control, **more)

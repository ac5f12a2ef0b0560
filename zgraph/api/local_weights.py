"""Tells who takes a state dict of a compiled model within a round of local steps whose weights are in it."""

from __future__ import annotations

from typing import Any

from torch import nn

from zgraph.runtime.runtime import Runtime


def watch_state_dicts(model: nn.Module) -> None:
    """Let `state_dict()` of a compiled model warn where weights are this rank's own."""
    if _before_state_dict not in model._state_dict_pre_hooks.values():
        model.register_state_dict_pre_hook(_before_state_dict)


def _before_state_dict(model: nn.Module, prefix: str, keep_vars: bool) -> None:
    # (its property refuses what can't run now: inside `full_weights`, and before the first call of a divided model)
    runtime: Any = getattr(model.__dict__.get("zgraph"), "_runtime", None)
    if isinstance(runtime, Runtime):
        runtime.updater.rounds.tell("state_dict()")

"""What happens before each step of an engine's optimizer, whether the engine or the script calls it.

Each hook of a model takes the place of the one that an earlier `initialize` of the model has left.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from zgraph.deepspeed.engine import Training

logger = logging.getLogger(__name__)

_Handles = weakref.WeakKeyDictionary[nn.Module, RemovableHandle]
_PASSED_OVER: _Handles = weakref.WeakKeyDictionary()
_CLIPPED: _Handles = weakref.WeakKeyDictionary()


def pass_over(model: nn.Module, names: Sequence[str], optimizer: torch.optim.Optimizer) -> None:
    """Let no step update the parameters of these names, which are in no group of the script's, should it thaw them; the first such step
    warns."""
    told = False

    def drop(*_: Any) -> None:
        nonlocal told
        thawed = [name for name in names if model.get_parameter(name).grad is not None]
        for name in thawed:
            model.get_parameter(name).grad = None
        if thawed and not told:
            told = True
            logger.warning(
                "%d parameters were thawed that are in no group (%s …): nothing updates them; initialize again with them in model_parameters",
                len(thawed),
                thawed[0],
            )

    _instead(_PASSED_OVER, model, optimizer, drop if names else None)


def clip_alone(model: nn.Module, training: Training, wanted: bool) -> None:
    """Clip the gradients before steps of the script's own optimizer that the engine does not make, if `wanted`: DeepSpeed's optimizers around
    it, of ZeRO and of low weights, clip whoever calls them."""

    def clip(*_: Any) -> None:
        params = [p for p in model.parameters() if p.grad is not None]
        if not training.stepping and params:
            nn.utils.clip_grad_norm_(params, training.clips)

    _instead(_CLIPPED, model, training.optimizer, clip if wanted and training.clips else None)


def _instead(
    handles: _Handles, model: nn.Module, optimizer: torch.optim.Optimizer, hook: Callable[..., None] | None
) -> None:
    if model in handles:
        handles.pop(model).remove()
    if hook is not None:
        handles[model] = optimizer.register_step_pre_hook(hook)

"""TRL's trainers that run a model's backbone alone, and multiply by its head in their loss (DistillationTrainer).

The compiled model's forward runs the backbone where it is asked to, so that this is a program like the others. The head's weight is whole in the
loss, where its gradient is averaged over the ranks.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from zgraph.api.peft_adapters import is_adapted
from zgraph.torch_compat.private_names import refuse_release

_METHOD = "_get_last_hidden_state"  # TRL's name
_CALL = "_compiled_call_impl"  # what `nn.Module.__call__` looks up first; captures do not


@contextmanager
def with_backbone_in_forward(trainer: Any) -> Iterator[None]:
    """Compile inside the block a model of which the trainer calls the backbone alone; of other trainers as it is.

    If the block raises, nothing was changed.
    """
    model = trainer.model
    if not hasattr(trainer, _METHOD) or "forward" in model.__dict__:
        yield
        return
    refuse_release("backbones")
    backbone = model.base_model.model.base_model if is_adapted(model) else model.base_model
    path = next(name for name, module in model.named_modules() if module is backbone)
    model.forward = types.MethodType(_forward_with(type(model).forward, path), model)
    try:
        yield
    except BaseException:
        del model.forward
        raise
    setattr(trainer, _METHOD, functools.partial(_hidden_state, model, backbone, getattr(trainer, _METHOD)))


def _forward_with(own: Callable[..., Any], path: str) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, of_backbone: bool = False, **kwargs: Any) -> Any:
        return self.get_submodule(path)(*args, **kwargs) if of_backbone else own(self, *args, **kwargs)

    return forward


def _hidden_state(
    model: Any, backbone: nn.Module, own: Callable[..., Any], asked: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run TRL's method. What it calls of the trained model's backbone is a call of the model."""
    if asked is not model:  # (the teacher)
        return own(asked, *args, **kwargs)
    before = backbone.__dict__.get(_CALL)
    backbone.__dict__[_CALL] = lambda *args, **kwargs: model(*args, of_backbone=True, **kwargs)
    try:
        return own(asked, *args, **kwargs)
    finally:
        backbone.__dict__[_CALL] = before

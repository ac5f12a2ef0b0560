"""Methods of transformers' models that a compiled one has otherwise: what makes other weights for it, or hooks at each call."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from zgraph.api.peft_adapters import is_adapted
from zgraph.errors import ModelError
from zgraph.runtime.compiled_models import is_compiled, owner_of

_RESIZE, _LET_LEARN = "resize_token_embeddings", "enable_input_require_grads"  # transformers' names


def replace_methods(model: nn.Module, divided: bool) -> None:
    """Refuse to resize the embeddings of a compiled model of transformers whose weights are divided, and let no more hooks of its own hang
    on them.

    `gradient_checkpointing_enable` hangs one more on them each time, which captures leave out, and TRL calls it for each generation: every
    step would be captured anew.
    """
    for module in model.modules() if divided else _outermost(model):
        if divided and hasattr(type(module), _RESIZE):
            module.__dict__[_RESIZE] = functools.partial(_refuse_resize, module)
        if hasattr(type(module), _LET_LEARN):
            module.__dict__[_LET_LEARN] = functools.partial(_leave, module)


def return_methods(model: nn.Module) -> None:
    """Undo `replace_methods`."""
    for module in model.modules():
        for name, ours in ((_RESIZE, _refuse_resize), (_LET_LEARN, _leave)):
            if getattr(module.__dict__.get(name), "func", None) is ours:
                del module.__dict__[name]


def _outermost(model: Any) -> list[nn.Module]:
    return [model, model.get_base_model()] if is_adapted(model) else [model]


def _refuse_resize(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not _is_of_a_model(module):
        return getattr(type(module), _RESIZE)(module, *args, **kwargs)
    raise ModelError(
        f"{_RESIZE} makes other weights for a compiled model",
        why="its programs, its optimizer and the ranks' parts are of those that it had when it was compiled",
        hint=f"model.{_RESIZE}(…) before zgraph.compile, or before zgraph.hf.attach",
    )


def _leave(module: nn.Module) -> None:
    """Do nothing for a compiled model: a backward gives the same without the output of frozen embeddings requiring gradients."""
    if not _is_of_a_model(module):
        getattr(type(module), _LET_LEARN)(module)


def _is_of_a_model(module: nn.Module) -> bool:
    """Return whether a module is a compiled model or a part of one, not a copy of such."""
    first = next(module.parameters(), None)
    return is_compiled(module) or (first is not None and owner_of(first) is not None)

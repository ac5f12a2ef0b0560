"""Leaving out what transformers does so that layers that are computed again have inputs with gradients.

With `gradient_checkpointing` a hook after the embeddings lets their output require gradients, for torch's older
(reentrant) checkpoints: with frozen embeddings, as under an adapter, these would give none. A captured step has no need of it, and no graph can
hold a tensor that begins to require gradients within.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from zgraph.hf.replaced_globals import Before

_METHOD = "enable_input_require_grads"  # transformers' name
_HOOKS = (f"{_METHOD}.<locals>.make_inputs_require_grads", ".<locals>.make_inputs_require_grad")  # its hook, and PEFT's


@dataclass(frozen=True)
class BeforeHook:
    """A forward hook before it was replaced."""

    hooks: MutableMapping[int, Any]  # the hooks of its module
    number: int  # its number there
    hook: Any  # the hook

    def restore(self) -> None:
        """Restore the hook, unless it was removed."""
        if self.number in self.hooks:
            self.hooks[self.number] = self.hook


def without_input_gradients(model: nn.Module) -> list[Before | BeforeHook]:
    """Let no embedding of a model's make its output require gradients, now or when checkpointing is enabled; return
    what was replaced."""
    transformers: Any = sys.modules["transformers"]
    replaced: list[Before | BeforeHook] = []
    for module in model.modules():
        hooks: Any = module._forward_hooks
        for number, hook in list(hooks.items()):
            if getattr(hook, "__qualname__", "").endswith(_HOOKS):
                replaced.append(BeforeHook(hooks, number, hook))
                hooks[number] = _unchanged
        if isinstance(module, transformers.PreTrainedModel):
            replaced.append(Before(module, _METHOD, module.__dict__.get(_METHOD)))
            module.__dict__[_METHOD] = _nothing
    return replaced


def _unchanged(module: nn.Module, args: Any, output: Any) -> None:
    """Leave the output as it is."""


def _nothing() -> None:
    """Enable nothing."""

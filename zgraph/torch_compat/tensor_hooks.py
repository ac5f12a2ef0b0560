"""Hooks of tensors and optimizers."""

from __future__ import annotations

import torch

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # a tensor's, by the functions that register them


def has_hooks(param: torch.Tensor) -> bool:
    """Return whether a parameter has hooks that autograd calls."""
    return bool(param._backward_hooks or param._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


def has_hook_over_several(param: torch.Tensor) -> bool:
    """Return whether a parameter has a hook of `torch.autograd.graph.register_multi_grad_hook`, which knows its tensors
    by their nodes."""
    hooks = param._backward_hooks or {}
    return any(getattr(h, "__module__", None) == "torch.autograd.graph" for h in hooks.values())


def move_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Give one tensor's hooks to another; the handles that remove them still do."""
    for name in _HOOKS:
        hooks = getattr(old, name)
        if hooks:
            setattr(new, name, hooks)


OPTIMIZER_HOOKS = tuple(
    f"_optimizer_{call}_{when}_hooks" for call in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
)  # the attributes in which a torch optimizer keeps its hooks

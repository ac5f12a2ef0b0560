"""Makes parameters that a compiled model has replaced refuse their use, since user code may still hold them.

A sharded parameter is another object than the one that the model was built with. An optimizer that was made before, or
a list of parameters that the user has kept, holds the old one: it gets no gradient, so nothing would be trained, in
silence. So the old object refuses whatever an optimizer, a clipping function or a hook does first. Its values can still
be read.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from zgraph.errors import ModelError, StepError
from zgraph.torch_compat import guards, tensor_hooks

_REASON = guards.REPLACED  # in the __dict__ of a replaced parameter: (what was done to the model, why it was replaced)


class ReplacedParameter(nn.Parameter):
    """The class that a replaced parameter gets. Raises `StepError` if it is used as if it still were the model's."""

    @property
    def grad(self) -> Any:
        """Raise `StepError`: gradients are at the parameter that replaced this one."""
        _refuse(self)

    @grad.setter
    def grad(self, value: Any) -> None:
        _refuse(self)


def _refuse(param: torch.Tensor, *args: Any, **kwargs: Any) -> NoReturn:
    done, why = param.__dict__.get(_REASON, ("the model was compiled", "the model has another parameter now"))
    raise StepError(
        f"an optimizer, or a list of parameters, that was made before {done}",
        why=why,
        hint="make it from model.parameters() after zgraph.compile(model, plan, inputs=…), or give the plan an optimizer",
    )


def _writes(name: str) -> bool:
    """Return whether a method of tensors, by its name, writes to them."""
    in_place = name.endswith("_") and not name.startswith("_")
    return in_place or (name.startswith("__i") and hasattr(torch.Tensor, "__" + name[3:]))


for _name in dir(torch.Tensor):
    if _writes(_name) or _name in ("__setitem__", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"):
        setattr(ReplacedParameter, _name, _refuse)


def replaced(old: nn.Parameter, fresh: nn.Parameter, done: str, why: str) -> None:
    """Replace `old` by `fresh`, which gets its attributes and hooks. From now on `old` refuses to be used, with what
    was `done` in its error.
    """
    fresh.__dict__.update(old.__dict__)
    tensor_hooks.move_hooks(old, fresh)
    old.__dict__[_REASON] = done, why
    if isinstance(old, nn.Parameter) and type(old) is nn.Parameter:
        old.__class__ = ReplacedParameter


def refuse_unmovable(model: nn.Module, *, replaces: bool, in_stages: bool) -> None:
    """Raise `ModelError` for what is attached to a parameter and would be lost in silence. If a shard replaces it
    (`replaces`): a gradient, or a hook over several parameters. In a pipeline (`in_stages`), whose backward is not
    autograd's: any hook.
    """
    for name, param in model.named_parameters():
        if in_stages and tensor_hooks.has_hooks(param):
            raise _hook_in_stages(name)
        if replaces and tensor_hooks.has_hook_over_several(param):
            raise ModelError(
                f"parameter {name!r} has a hook over several parameters",
                why="register_multi_grad_hook waits for the parameters that it was given, and the model has their shards now",
                hint="register it after zgraph.compile(model, plan, inputs=…)",
            )
        if replaces and param.grad is not None:
            raise ModelError(
                f"parameter {name!r} has a gradient already",
                why="it is this rank's own and of the whole parameter, of which the model has a shard now",
                hint="model.zero_grad() before zgraph.compile",
            )


def refuse_hooks(params: dict[str, nn.Parameter]) -> None:
    """Raise `ModelError` if a parameter of a model in stages has a hook."""
    for name, param in params.items():
        if tensor_hooks.has_hooks(param):
            raise _hook_in_stages(name)


def _hook_in_stages(name: str) -> ModelError:
    return ModelError(
        f"parameter {name!r} of a model in stages has a hook",
        where="mesh.pp",
        why="gradients of its micro-batches are added up by the schedule, and not by autograd, which calls hooks",
        hint="model.zgraph.on_gradients(hook) is called with the gradients before each update",
    )

"""Reading and writing the whole value, gradient and optimizer states of a sharded parameter.

All ranks must call these. The parameter is one of a compiled model's (`engine.module.parameters()`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from zgraph.errors import ModelError, StepError
from zgraph.runtime.compiled_models import owner_of
from zgraph.update.build_update import MASTER
from zgraph.update.optimizer import copy_state

_KEYS = {"fp32": MASTER}


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the whole parameter in float32, from its master weight if there is one; None if it is frozen, as DeepSpeed
    does (`param.full_tensor()` is its value)."""
    return _whole(_accurate(param)).float() if param.requires_grad else None


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Write the whole parameter and its master weight. Raises `ModelError` for a value of another shape, as the other
    setters do."""
    _refuse_another_shape(value, param, "a parameter")
    master = _made_master(param)
    if master is not None:
        copy_state(master, value.to(master.dtype))
    copy_state(param.detach(), value.to(param.dtype))


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the whole gradient, averaged over ranks; None if there is none. Between a backward and `step()` there
    is one."""
    return None if param.grad is None else _whole(param.grad.detach())


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Write the whole gradient. Raises `StepError` if there is none yet."""
    if param.grad is None:
        raise StepError("the parameter has no gradient to write to", hint="call it between a backward and step()")
    _refuse_another_shape(value, param.grad, "the gradient of a parameter")
    copy_state(param.grad, value.to(param.grad.dtype))


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a state of the optimizer ("exp_avg", "exp_avg_sq", …) for the whole parameter; None before the first
    update, and if there is none of this name."""
    state = _state(param, optim_state_key)
    return None if state is None else _whole(state)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Write a state of the optimizer for the whole parameter. Raises `ModelError` if there is none of this name."""
    state = _required(param, optim_state_key)
    _refuse_another_shape(value, state, f"{optim_state_key!r} of a parameter")
    copy_state(state, value.to(state.dtype))


# -- this rank's shard --------------------------------------------------------------------------------------------------------
def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's rows of the parameter in float32; None if it is frozen."""
    return _local(_accurate(param)).float() if param.requires_grad else None


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's rows of the gradient; None if there is none."""
    return None if param.grad is None else _local(param.grad.detach())


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return this rank's rows of a state of the optimizer; None if there is none."""
    state = _state(param, optim_state_key)
    return None if state is None else _local(state)


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Write this rank's rows of the parameter and of its master weight. Raises `ModelError` for another number of elements,
    as the other setters do."""
    master = _made_master(param)
    if master is not None:
        _write_local(master, value)
    _write_local(param.detach(), value)


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Write this rank's rows of the gradient. Raises `StepError` if there is none yet."""
    if param.grad is None:
        raise StepError("the parameter has no gradient to write to", hint="call it between a backward and step()")
    _write_local(param.grad.detach(), value)


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Write this rank's rows of a state of the optimizer. Raises `ModelError` if there is none of this name."""
    _write_local(_required(param, optim_state_key), value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace each whole gradient by `update_func(gradient, parameter)`, skipping parameters without a gradient."""
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


def _write_local(tensor: torch.Tensor, value: torch.Tensor) -> None:
    mine = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if value.numel() != mine.numel():
        raise ModelError(
            f"a value of shape {list(value.shape)} was given for the rows {list(mine.shape)} of this rank",
            hint="a value of that shape; or the safe_set_full_ function, with the whole on all ranks",
        )
    with torch.no_grad():
        mine.copy_(value.view_as(mine))


def _refuse_another_shape(value: torch.Tensor, tensor: torch.Tensor, what: str) -> None:
    if value.shape != tensor.shape:
        raise ModelError(
            f"a value of shape {list(value.shape)} was given for {what} of shape {list(tensor.shape)}",
            hint="give the whole value, equal on all ranks",
        )


def _required(param: nn.Parameter, name: str) -> torch.Tensor:
    state = _state(param, name)
    if state is None:
        raise ModelError(
            f"the optimizer keeps no {name!r} of this parameter", hint="states are there after the first step"
        )
    return state


def _accurate(param: nn.Parameter) -> torch.Tensor:
    """Return a parameter's master weight, or the parameter itself if it has none."""
    master = _state(param, MASTER)
    return param.detach() if master is None else master


def _made_master(param: nn.Parameter) -> torch.Tensor | None:
    """Return a parameter's master weight, made if there has been no update yet; None if it has none."""
    model = owner_of(param)
    if param.dtype is not torch.float32 and model is not None:
        handle: Any = model.__dict__["zgraph"]
        if handle.deferred is None and handle.optimizer is not None:
            handle.runtime.updater.make_states()
    return _state(param, MASTER)


def _state(param: nn.Parameter, name: str) -> torch.Tensor | None:
    """Return a parameter's optimizer state by DeepSpeed's name or the plan's; None if there is none.

    Raises `ModelError` for a parameter that does not belong to a compiled model.
    """
    model = owner_of(param)
    if model is None:
        raise ModelError(
            f"a parameter of shape {list(param.shape)} is no compiled model's",
            why="it is another object since the model was compiled, or its model was not",
            hint="take it from engine.module.parameters()",
        )
    handle: Any = model.__dict__["zgraph"]
    optimizer = handle.optimizer if handle.deferred is None else None
    return None if optimizer is None else optimizer.state.get(param, {}).get(_KEYS.get(name, name))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().clone() if isinstance(tensor, DTensor) else tensor.clone()


def load_whole(model: nn.Module, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load whole tensors, equal on all ranks, or shards into a compiled model. All ranks must call it."""
    state = dict(state_dict)
    params = dict(model.named_parameters(remove_duplicate=False))
    for name, value in state.items():
        mine = params.get(name)
        if isinstance(mine, DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            state[name] = distribute_tensor(value.to(mine.device, mine.dtype), mine.device_mesh, mine.placements)
    model.load_state_dict(state, strict=strict)

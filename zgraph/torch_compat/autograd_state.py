"""The state of autograd and of the dispatcher that code runs in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode


def keeps_graph() -> bool:
    """Whether the running backward pass is one with retain_graph=True."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def accumulates(node: Any) -> bool:
    """Does the running backward add to `.grad` of the leaf that this AccumulateGrad node is of? (Not so of one by `torch.autograd.grad`, and
    of one with `inputs` only of these.)"""
    try:
        return bool(torch._C._will_engine_execute_node(node))  # type: ignore[attr-defined]
    except RuntimeError:  # (torch's answer for a leaf whose gradient `torch.autograd.grad` returns)
        return False


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that `torch.compile` calls as it is, at a graph break, and does not trace."""
    reason = "zgraph runs a compiled model: torch.compile around it calls it as a whole (fullgraph=True can't)"
    return torch._dynamo.disable(function, reason=reason)  # type: ignore[no-any-return, no-untyped-call]


def is_transformed() -> bool:
    """Whether this is inside of a transform of `torch.func`, or of `torch.jit.trace`."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None


def in_forward_mode() -> bool:
    """Whether this is inside of forward-mode differentiation."""
    return forward_ad._current_level >= 0


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether forward-mode differentiation follows this tensor."""
    return in_forward_mode() and forward_ad.unpack_dual(tensor).tangent is not None


def call_module(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a module's class does to call it: hooks, and its forward."""
    return type(module)._call_impl(module, *args, **kwargs)


def below_autograd() -> Any:
    """Operators inside run without a look at autograd: a program has its own backward. (A collective's start costs 15 us less.)"""
    return torch._C._AutoDispatchBelowAutograd()


def without_bases() -> Any:
    """Views that are made inside do not keep alive what they are views of, and writes are not counted: what a program makes inside is nobody
    else's."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView))


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """What starts inside is in no profile. gloo's threads write into a profile when a transfer ends, and crash where the
    profile has ended before it."""
    autograd: Any = torch._C._autograd
    autograd._enable_record_function(False)
    try:
        yield
    finally:
        autograd._enable_record_function(True)


class _WithoutCopies(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        return func(*args, **(kwargs or {}))


def without_copies() -> Any:
    """A context in which a copy of a tensor is a view of it: what is made by taking parts is then seen to be that."""
    return _WithoutCopies()

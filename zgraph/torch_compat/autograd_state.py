"""The state of autograd and of the dispatcher that code runs in."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo import eval_frame
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode


def keeps_graph() -> bool:
    """Return whether the running backward pass is one with retain_graph=True."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def packs_saved_tensors() -> Callable[..., Any] | None:
    """Return the function that packs what autograd saves here (`torch.autograd.graph.saved_tensors_hooks`); None if there is none."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    return hooks[0] if hooks is not None else None


def accumulates(node: Any) -> bool:
    """Return whether this is the node of a leaf (an AccumulateGrad), and the running backward adds to the leaf's `.grad`.

    `torch.autograd.grad` does not, nor does a backward whose `inputs` leave the leaf out.
    """
    if not hasattr(node, "variable"):
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))  # type: ignore[attr-defined]
    except RuntimeError:  # (torch's answer for a leaf whose gradient `torch.autograd.grad` returns)
        return False


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function so marked that `torch.compile` breaks the graph and calls it, instead of tracing it.

    (What `torch._dynamo.disable` returns also writes annotations into a table of the whole process while any thread
    captures a model. Two threads that do so at once meet a KeyError, so its marks are taken, and not its wrapper.)
    """
    reason = "zgraph runs a compiled model: torch.compile around it calls it as a whole (fullgraph=True can't)"
    marked = torch._dynamo.disable(function, reason=reason)  # type: ignore[no-untyped-call]

    def run(*args: Any, **kwargs: Any) -> Any:
        before = eval_frame.set_eval_frame(None)  # type: ignore[attr-defined]
        try:
            return function(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(before)  # type: ignore[attr-defined]

    eval_frame.skip_code(run.__code__)
    functools.update_wrapper(run, function)
    marks = {name: value for name, value in vars(marked).items() if name.startswith("_torchdynamo")}
    vars(run).update(marks, _torchdynamo_wrapper_id=id(run))
    return run


def is_transformed() -> bool:
    """Return whether the code runs inside a transform of `torch.func`, or inside `torch.jit.trace`."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None


def in_forward_mode() -> bool:
    """Return whether the code runs inside forward-mode differentiation."""
    return forward_ad._current_level >= 0


def has_tangent(tensor: torch.Tensor) -> bool:
    """Return whether forward-mode differentiation follows this tensor."""
    return in_forward_mode() and forward_ad.unpack_dual(tensor).tangent is not None


def call_module(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module as its class does: its hooks and its forward."""
    return type(module)._call_impl(module, *args, **kwargs)


def below_autograd() -> Any:
    """Return a context whose operators skip autograd, since a program has its own backward. (The start of a collective
    costs 15 us less.)"""
    return torch._C._AutoDispatchBelowAutograd()


def without_bases() -> Any:
    """Return a context in which views do not keep their base alive and in-place writes do not raise version counters.

    A program's own values are read by nobody else, so neither is needed.
    """
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView))


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Leave what starts inside out of every profile.

    gloo's threads write into a profile when a transfer ends, and crash if the profile has ended before it.
    """
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
    """Return a context in which `clone` gives a view, so that a value that only takes parts of a tensor shows as a view
    of it."""
    return _WithoutCopies()

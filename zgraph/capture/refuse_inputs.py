"""Refuses what programs can't take: inputs and states of the model that are not plain tensors, and calls inside another
tracer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from zgraph.capture.replaced_forward import signature_of
from zgraph.errors import SignatureError, UnsupportedError
from zgraph.torch_compat import autograd_state


def refuse_inputs(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise `UnsupportedError` for a call that no program can be made for, naming the argument of `forward`
    (`SignatureError` for a DTensor).

    The check costs nothing for plain tensors.
    """
    if autograd_state.is_transformed():
        raise UnsupportedError(
            "a compiled model is called inside of a transform",
            why="torch.func (vmap, grad, jvp, …), torch.jit.trace and the like look into the model's operators, and a program has one",
            hint="transform the plain model; torch.func.functional_call alone works",
        )
    if all(map(_is_plain, args)) and all(map(_is_plain, kwargs.values())) and not autograd_state.in_forward_mode():
        return
    for place, value in _leaves(forward, args, kwargs):
        fault = _fault_of(value) if isinstance(value, torch.Tensor) else None
        if isinstance(value, torch.Generator):
            fault = (
                "a torch.Generator",
                "a program draws from torch's own generator",
                "torch.manual_seed(…), and no generator",
            )
        if fault is not None:
            kind, why, hint = fault
            error = SignatureError if isinstance(value, DTensor) else UnsupportedError
            raise error(f"the input {place} is {kind}", where=f"{place} of the call", why=why, hint=hint)


def resolved(x: Any) -> Any:
    """Return an input as programs read it: with its values computed where it is only marked as conjugate or negative."""
    if isinstance(x, torch.Tensor) and (x.is_conj() or x.is_neg()):
        return x.resolve_conj().resolve_neg()
    return x


def refuse_state(module: nn.Module) -> None:
    """Raise `UnsupportedError` for a model with parameters or buffers that are no plain tensors, or with backward hooks
    on modules inside it."""
    for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in tensors:
            fault = None if isinstance(tensor, DTensor) else _fault_of(tensor)
            if fault is not None:
                raise UnsupportedError(f"{kind} {name!r} is {fault[0]}", where=name, why=fault[1], hint=fault[2])
    for name, child in module.named_modules():
        if name and (child._backward_hooks or child._backward_pre_hooks):
            raise UnsupportedError(
                f"module {name!r} has a backward hook",
                where=name,
                why="a program's backward is one piece: there is no gradient of a module's inputs or outputs to give to it",
                hint="tensor.register_hook(…) in forward by a function that changes nothing outside, or hooks on parameters or on the whole model",
            )


def _is_plain(x: Any) -> bool:
    """Return whether this is a plain tensor, or neither a tensor nor a container."""
    if type(x) is torch.Tensor:
        return x.layout is torch.strided and not x.is_nested
    return x is None or isinstance(x, (bool, int, float, str))


def _leaves(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a call's arguments, with their names."""
    names = [repr(p.name) for p in list(signature_of(forward).parameters.values())[1:]]
    named = [(names[i] if i < len(names) else f"[{i}]", a) for i, a in enumerate(args)]
    for name, argument in [*named, *((repr(k), v) for k, v in kwargs.items())]:
        for path, leaf in pytree.tree_flatten_with_path(argument)[0]:
            yield name + pytree.keystr(path), leaf


Fault = tuple[str, str, str]


def _fault_of(x: torch.Tensor) -> Fault | None:
    """Return (what a tensor is, why no program takes it, what to do); None for a plain one."""
    if x.is_nested:
        return "a nested tensor", "programs are made for fixed sizes", "pad it: x.to_padded_tensor(0.0), with a mask"
    if x.layout is not torch.strided:
        layout = str(x.layout).removeprefix("torch.")
        return (
            f"a sparse tensor ({layout})",
            "programs take strided tensors",
            "give indices and values, or x.to_dense()",
        )
    if isinstance(x, DTensor):
        return "a DTensor", "a call takes this rank's own batch", "give its local tensor"
    if isinstance(x, FakeTensor):
        return (
            "a FakeTensor",
            "it has no values to compute with",
            "give a real tensor: programs without any are what `zgraph dump` shows",
        )
    if autograd_state.has_tangent(x):
        return (
            "a dual tensor of forward-mode differentiation",
            "a program has no forward-mode derivative",
            "use the plain model",
        )
    kind = type(x)
    if isinstance(x, nn.Parameter) and kind is not nn.Parameter and not (x.is_floating_point() or x.is_complex()):
        return (
            f"a {kind.__qualname__}, quantized weights of {kind.__module__.partition('.')[0]}",
            "only its own class knows what the numbers mean",
            'load the model without quantization: precision="bf16" and zero=3 of a plan divide what weights take',
        )
    given = kind.__torch_function__
    if (
        getattr(given, "__func__", given) not in _PLAIN_FUNCTIONS
        or hasattr(x, "__tensor_flatten__")
        or _dispatches(kind)
    ):
        return (
            f"a {kind.__qualname__}, a tensor of a class with operators of its own",
            "programs compute with plain tensors, and would leave these out",
            "give a plain tensor: x.as_subclass(torch.Tensor), or what it wraps",
        )
    return None


_PLAIN_FUNCTIONS = (
    torch.Tensor.__torch_function__.__func__,  # type: ignore[attr-defined]
    nn.Parameter.__torch_function__,
)


def _dispatches(kind: type) -> bool:
    return getattr(kind, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__

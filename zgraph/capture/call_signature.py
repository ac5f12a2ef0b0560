"""The key that a program is cached by: everything about a call that capture specialises on."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zgraph.capture.learned_sizes import CONSTANT, MARK, VALUE, Signature, Value
from zgraph.torch_compat import dynamo
from zgraph.torch_compat.modules import Registered, registered


def signature(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return a readable key: everything that `signed` has, with shapes."""
    return signed(module, args, kwargs).text()


def signed(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    constants: Sequence[torch.Tensor] = (),
    own: Registered | None = None,
) -> Signature:
    """Return the signature of a call: structure, shapes, dtypes and values of the inputs, modes of the modules, forms
    of the buffers, grad and autocast modes.

    (Parameters have the form of their layouts: `Shards.refresh`.) It has the values of inputs that are `constants`.
    `own` is what the module has registered, if that is known.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors: list[torch.Tensor] = []
    numbers: list[str] = []
    values: tuple[Value, ...] = tuple([(tuple(x.shape), tuple(x.flatten().tolist())) for x in constants])
    number_of = {id(x): number for number, x in enumerate(constants)}
    told = [_input(leaf, tensors, numbers, number_of) for leaf in leaves]
    inputs = ", ".join(told)
    own = own or registered(module)
    training = "".join(["t" if child.training else "e" for child in own.modules])
    frozen = "".join(["g" if p.requires_grad else "f" for p in own.parameters.values()])
    forms = (f"{_form(b)}{', grad' if b.requires_grad else ''}" for b in own.buffers)
    buffers = ", ".join(f"{n} {form}" if n > 1 else form for form, n in _repeated(forms))
    grad = "grad" if torch.is_grad_enabled() else "no_grad"
    casts = [f"{d}:{torch.get_autocast_dtype(d)}" for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    same = "".join(f"; {one} is {other}" for one, other in _identical(own.modules, leaves))
    modes = f"modules {_runs(training)}; parameters {_runs(frozen)}; buffers ({buffers})"
    family = f"inputs ({inputs}{same}); structure {spec}"
    form = f"{family}; {modes}; {grad}; autocast {casts}"
    shown = tuple([_shown(leaf, text, number_of) for leaf, text in zip(leaves, told, strict=True)])
    return Signature(form, family, tuple(tensors), tuple(numbers), shown, tuple(constants), values, (args, kwargs))


def _shown(leaf: Any, told: str, constants: Collection[int]) -> str:
    if type(leaf) in (int, float):
        return repr(leaf)
    return str(leaf.tolist()) if id(leaf) in constants else told


def _input(leaf: Any, tensors: list[torch.Tensor], numbers: list[str], constants: Mapping[int, int]) -> str:
    """Return the text of one leaf of the inputs, and note it in `tensors` or `numbers`.

    A tensor whose sizes may differ from call to call has a mark and its number of dimensions in place of the shape, a
    Python number a mark in place of its value, and one of the `constants` (numbered by id) a mark in place of both
    shape and values.
    """
    if type(leaf) in (int, float):
        numbers.append(repr(leaf))
        return f"{VALUE}{len(numbers) - 1}{VALUE} of type {type(leaf).__name__}"
    if id(leaf) in constants:
        mark = f"{CONSTANT}{constants[id(leaf)]} of {leaf.dim()} dimensions{CONSTANT}"
        return _leaf(leaf, set()).replace(str(list(leaf.shape)), mark, 1)
    plain = type(leaf) is torch.Tensor and leaf.layout is torch.strided and leaf.dim() > 0 and leaf.is_contiguous()
    if not plain:
        return _leaf(leaf, set())
    tensors.append(leaf)
    shape = str(list(leaf.shape))
    return _leaf(leaf, set()).replace(shape, f"{MARK}{len(tensors) - 1} of {leaf.dim()} dimensions{MARK}", 1)


def _identical(modules: Sequence[nn.Module], leaves: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Yield pairs of names of tensors that are one object: an input and an earlier one, or an input and a tensor that
    the module has registered."""
    first: dict[int, str] = {}
    for number, tensor in enumerate(_tensors(leaves)):
        if id(tensor) in first:
            yield f"tensor {number}", first[id(tensor)]
        else:
            first[id(tensor)] = f"tensor {number}"
    if first:
        for child in modules:
            for table in (child._parameters, child._buffers):
                for key, registered_tensor in table.items():
                    if id(registered_tensor) in first:
                        yield first[id(registered_tensor)], f"{type(child).__name__}.{key}"


def _tensors(leaves: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among the leaves, and inside objects that are no pytrees, in order."""
    stack, seen = list(reversed(leaves)), set()
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif id(item) not in seen:
            seen.add(id(item))
            stack.extend(reversed(_inner(item)))


def _inner(item: Any) -> list[Any]:
    """Return the items of a container, or the attributes of an object; nothing for a module, a class or a function."""
    if isinstance(item, (list, tuple)):
        return list(item)
    if isinstance(item, dict):
        return list(item.values())
    shut = isinstance(item, (nn.Module, type)) or callable(item) or not hasattr(item, "__dict__")
    return [] if shut else list(vars(item).values())


def batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return the rows of a call's batch: dimension 0 of its first tensor that has one; None where there is none."""
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    return None


def batch_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the rows of a call's batch, 1 where it has none."""
    rows = batch_size(args, kwargs)
    return 1 if rows is None else rows


def shared(key: str) -> str:
    """Return the part of a signature that must be equal on all ranks: without device indices and object addresses."""
    return re.sub(r"#\d+", "", re.sub(r"(@[a-z]+):\d+|, index=\d+", r"\1", key))


def brief(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the part of a signature that a person wants to see."""
    named = [*((f"[{i}]", a) for i, a in enumerate(args)), *kwargs.items()]
    shown = ", ".join(f"{name}={_leaf(leaf, set())}" for name, leaf in named)
    return f"{shown}; {'train' if module.training else 'eval'}, {'grad' if torch.is_grad_enabled() else 'no_grad'}"


def _runs(flags: str) -> str:
    """Return the run-length encoding of flags: "tttte" -> "4t1e"."""
    return "".join(f"{n}{flag}" for flag, n in _repeated(flags))


def _repeated(values: Iterable[str]) -> list[tuple[str, int]]:
    """Return each value with the length of its run."""
    return [(value, len(list(same))) for value, same in itertools.groupby(values)]


def _form(tensor: torch.Tensor) -> str:
    """Return a tensor's dtype and shape, and its strides where it is not contiguous."""
    strides = "" if tensor.is_contiguous() else f", strides {list(tensor.stride())}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{strides}"


def _leaf(leaf: Any, seen: set[int]) -> str:
    if isinstance(leaf, torch.Tensor):
        names = sorted(dynamo.hung_on(leaf)) if type(leaf) is torch.Tensor and vars(leaf) else ()
        hung = f", with {' '.join(names)}" if names else ""
        return f"{_form(leaf)}@{leaf.device}{', grad' if leaf.requires_grad else ''}{hung}"
    if leaf is None or isinstance(leaf, (bool, int, float, str, bytes, complex, torch.dtype, torch.device)):
        return repr(leaf)
    if id(leaf) in seen:
        return "…"
    seen = seen | {id(leaf)}
    if isinstance(leaf, dict):
        return "{" + ", ".join(f"{k!r}: {_leaf(v, seen)}" for k, v in leaf.items()) + "}"
    if isinstance(leaf, (list, tuple, set, frozenset)):
        return f"{type(leaf).__name__}(" + ", ".join(_leaf(v, seen) for v in leaf) + ")"
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        fields = {f.name: getattr(leaf, f.name, None) for f in dataclasses.fields(leaf)}
        return type(leaf).__qualname__ + _leaf(fields, seen)
    if isinstance(leaf, (nn.Module, type)) or callable(leaf):
        return type(leaf).__qualname__  # (its identity and contents are checked by a capture's guards)
    return type(leaf).__qualname__ + _leaf(dict(getattr(leaf, "__dict__", {})), seen)

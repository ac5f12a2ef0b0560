"""Elements of small tensors that are sizes: numbers or symbols that are known while a model is traced.

A fake tensor has a list of its elements where these are known. Operators that move, add, multiply or sum whole numbers
give tensors with such lists, so that what a model takes out of them (`tolist`, `item`) is arithmetic on the symbols. Of
anything else the elements are unknown: torch then makes a size that depends on values of what is taken out. The
operators themselves stay in the graph: what is computed with such a tensor is computed of the call's own values.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from zgraph.torch_compat import fake_tensors, symbols

_aten = torch.ops.aten
_LIST = "_zgraph_elements"  # the attribute of a fake tensor that has its elements, in order
_WRITTEN = "_zgraph_written"  # the attribute of one that was written to since
_GIVEN = "_zgraph_given_elements"  # of an input: its elements as they are when the call begins

# Operators that only move elements.
_MOVING = (
    _aten.select.int, _aten.slice.Tensor, _aten.view.default, _aten._unsafe_view.default, _aten.expand.default, _aten.permute.default,
    _aten.transpose.int, _aten.t.default, _aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims,
    _aten.unbind.int, _aten.split.Tensor, _aten.split_with_sizes.default, _aten.cat.default, _aten.stack.default, _aten.clone.default,
    _aten.alias.default, _aten.detach.default, _aten.lift_fresh.default, _aten.flip.default, _aten.repeat.default,
)  # fmt: skip

_ELEMENTWISE: dict[Any, Callable[..., Any]] = {
    _aten.add.Tensor: lambda a, b, alpha=1: a + alpha * b,
    _aten.sub.Tensor: lambda a, b, alpha=1: a - alpha * b,
    _aten.rsub.Scalar: lambda a, b, alpha=1: b - alpha * a,
    _aten.mul.Tensor: operator.mul,
    _aten.floor_divide.default: operator.floordiv,
    _aten.floor_divide.Scalar: operator.floordiv,
    _aten.neg.default: operator.neg,
    _aten.maximum.default: torch.sym_max,
    _aten.minimum.default: torch.sym_min,
}

_REDUCING: dict[Any, Callable[[Any, Any], Any]] = {
    _aten.sum.default: operator.add,
    _aten.sum.dim_IntList: operator.add,
    _aten.prod.default: operator.mul,
    _aten.prod.dim_int: operator.mul,
    _aten.max.default: torch.sym_max,
    _aten.min.default: torch.sym_min,
}

LARGEST = 1 << 20  # no element above is a symbol (a time stamp): products of three fit into 64 bits

_BITS = {torch.int32: 31, torch.int64: 63}
KNOWN_DTYPES = frozenset(_BITS)  # of tensors whose elements are known: others wrap around soon


class _Unknown(Exception):
    """Raised where the elements of an operator's result are not known."""


def give_elements(fake: torch.Tensor, elements: Sequence[Any]) -> None:
    """Note the elements of a fake input, in order."""
    setattr(fake, _GIVEN, list(elements))
    _set_elements(fake, elements)


def given_elements(fake: Any) -> list[Any] | None:
    """Return the elements of a fake input as the call begins; None where they are unknown."""
    return getattr(fake, _GIVEN, None)


def elements_of(fake: Any) -> list[Any] | None:
    """Return the elements of a fake tensor, in order; None where they are unknown."""
    return None if hasattr(fake, _WRITTEN) else getattr(fake, _LIST, None)


def first_elements(fake: Any) -> list[Any] | None:
    """Return the elements that a fake tensor had before anything was written to it; None where they were unknown."""
    return getattr(fake, _LIST, None)


def fits(env: Any) -> list[Any]:
    """Return the conditions under which whole numbers in an environment did not wrap around."""
    return list(_fits.get(env, ()))


_tensors: list[weakref.ref[torch.Tensor]] = []  # those that have elements, while `known_elements` is active
_fits: weakref.WeakKeyDictionary[Any, dict[Any, None]] = weakref.WeakKeyDictionary()


def _set_elements(fake: torch.Tensor, elements: Sequence[Any]) -> None:
    setattr(fake, _LIST, list(elements))
    if hasattr(fake, _WRITTEN):  # (an input, once more)
        delattr(fake, _WRITTEN)
    _tensors.append(weakref.ref(fake))


@contextlib.contextmanager
def known_elements(known: bool, inputs: Sequence[Any] = ()) -> Iterator[None]:
    """Let operators on fake tensors give the elements of their results; those of `inputs` are as the call begins."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    if not known:
        yield
        return
    for fake in inputs:
        if (elements := given_elements(fake)) is not None:
            _set_elements(fake, elements)
    dispatch, copy = FakeTensorMode.dispatch, FakeTensorMode.from_tensor

    def dispatched(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatched(functools.partial(dispatch, mode, func, types), mode, func, args, kwargs or {})

    def copied(mode: Any, tensor: torch.Tensor, **how: Any) -> torch.Tensor:  # (AOTAutograd traces with copies)
        fake = copy(mode, tensor, **how)
        if (elements := elements_of(tensor)) is not None:
            _set_elements(fake, elements)
        return fake

    FakeTensorMode.dispatch = dispatched  # type: ignore[method-assign, assignment]
    FakeTensorMode.from_tensor = copied  # type: ignore[method-assign, assignment]
    try:
        with symbols.solved_for_sizes():
            yield
    finally:
        FakeTensorMode.dispatch = dispatch  # type: ignore[method-assign]
        FakeTensorMode.from_tensor = copy  # type: ignore[method-assign]
        _tensors.clear()


def _dispatched(run: Callable[..., Any], mode: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator on fake tensors, and note the elements of its results."""
    writes = func._schema.is_mutable
    known = any(elements_of(x) is not None for x in pytree.tree_leaves((args, kwargs)))
    if known and func is _aten._local_scalar_dense.default:
        return elements_of(args[0])[0]  # type: ignore[index]
    if known and func is _aten.repeat_interleave.Tensor:
        return _repeated(mode, args[0])
    result = run(args, kwargs)
    if writes:
        _forget_written(func, args, kwargs)
    elif known:
        results = result if isinstance(result, (tuple, list)) else [result]
        with contextlib.suppress(_Unknown):
            for one, elements in zip(results, _computed(func, args, kwargs, results), strict=True):
                _set_elements(one, elements)
    return result


def _forget_written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Forget the elements of all tensors that share memory with what an operator writes to."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        written = {x.untyped_storage()._cdata for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)}
        for tensor in [x for ref in _tensors if (x := ref()) is not None and elements_of(x) is not None]:
            if tensor.untyped_storage()._cdata in written:
                setattr(tensor, _WRITTEN, True)


def _repeated(mode: Any, repeats: torch.Tensor) -> torch.Tensor:
    """Return the indices that repeat each place as often as `repeats` says.

    What an element by itself repeats (frames) is a number of things that forward is likely to go through one by one: it
    becomes a number here. What a product repeats (height times width) is a size.
    """
    counts = [int(n) if symbols.is_element(n) else n for n in _known(repeats)]
    fake = fake_tensors.empty(mode, [sum(counts)], [1], repeats.dtype, repeats.device)
    if all(type(n) is int for n in counts) and sum(counts) <= fake_tensors.MOST_KNOWN:
        _set_elements(fake, [at for at, count in enumerate(counts) for _ in range(count)])
    return fake


def _known(x: Any) -> list[Any]:
    """Return the elements of a tensor. Raises `_Unknown` where there are none of them, or it is not of whole numbers."""
    elements = elements_of(x)
    if elements is None:
        constant = getattr(x, "constant", None)
        if constant is None or constant.dtype not in _BITS:
            raise _Unknown
        elements = constant.reshape(-1).tolist()
    return elements


def _numbers(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of known numbers as a real one. Raises `_Unknown` where one is a symbol."""
    elements = _known(x)
    if any(type(n) is not int for n in elements):
        raise _Unknown
    return torch.tensor(elements, dtype=torch.int64).reshape(tuple(x.shape))


def _computed(func: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Any]) -> list[list[Any]]:
    """Return the elements of an operator's results. Raises `_Unknown` where they are not known."""
    from torch.utils._mode_utils import no_dispatch

    for x in results:
        if not isinstance(x, torch.Tensor) or x.dtype not in _BITS:
            raise _Unknown
        if any(isinstance(n, torch.SymInt) for n in x.shape) or x.numel() > fake_tensors.MOST_KNOWN:
            raise _Unknown
    with no_dispatch():
        if func in _ELEMENTWISE:
            computed = [_elementwise(_ELEMENTWISE[func], args, kwargs, results[0].shape)]
        elif func is _aten.div.Tensor_mode and kwargs.get("rounding_mode") == "floor":
            computed = [_elementwise(operator.floordiv, args, {}, results[0].shape)]
        elif func in _REDUCING:
            computed = [_reduced(_REDUCING[func], *args)]
        elif func is _aten.cumsum.default:
            computed = [_summed_up(*args[:2])]
        else:
            computed = _moved(func, args, kwargs)
    for x, elements in zip(results, computed, strict=True):
        for n in elements:
            _fit(n, _BITS[x.dtype])
    return computed


def _fit(number: Any, bits: int) -> None:
    """Note that a number, or a symbol, is assumed to fit into these bits. Raises `_Unknown` where it does not."""
    if not -(2**bits) <= symbols.hint(number) < 2**bits:
        raise _Unknown
    if isinstance(number, torch.SymInt):
        env = symbols.environment(number)
        _fits.setdefault(env, {}).update(dict.fromkeys(symbols.within(number, 2**bits, LARGEST)))


def _moved(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[list[Any]]:
    """Return the elements of what moves elements, by moving their places."""
    elements: list[Any] = []

    def places(x: Any) -> Any:
        if isinstance(x, torch.SymInt):
            raise _Unknown
        if not isinstance(x, torch.Tensor):
            return x
        begin = len(elements)
        elements.extend(_known(x))
        return torch.arange(begin, len(elements)).reshape(tuple(x.shape))

    if func in _MOVING:
        moved = func(*pytree.tree_map(places, tuple(args)), **kwargs)
    elif func is _aten._to_copy.default:
        moved = places(args[0])
    elif func is _aten._reshape_alias.default:
        moved = places(args[0]).reshape(args[1])
    elif func is _aten.constant_pad_nd.default:
        at = places(args[0])
        value = args[2] if len(args) > 2 else 0
        if isinstance(value, torch.SymInt | torch.SymFloat) or int(value) != value:
            raise _Unknown
        elements.append(int(value))
        moved = func(at, *pytree.tree_map(places, args[1:2]), len(elements) - 1)
    elif func is _aten.index_select.default:
        moved = func(places(args[0]), args[1], _numbers(args[2]))
    elif func is _aten.index.Tensor:
        moved = func(places(args[0]), [None if x is None else _numbers(x) for x in args[1]])
    else:
        raise _Unknown
    return [
        [elements[at] for at in one.reshape(-1).tolist()]
        for one in (moved if isinstance(moved, (tuple, list)) else [moved])
    ]


def _elementwise(
    of: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], shape: Sequence[int]
) -> list[Any]:
    """Return the elements of arithmetic on tensors and numbers, by place."""
    operands = []
    for x in args:
        if isinstance(x, torch.Tensor):
            known = _known(x)
            places = torch.arange(len(known)).reshape(tuple(x.shape)).expand(tuple(shape))
            operands.append([known[at] for at in places.reshape(-1).tolist()])
        elif type(x) in (int, torch.SymInt):
            operands.append([x] * torch.Size(shape).numel())
        else:
            raise _Unknown
    try:
        return [of(*each, **kwargs) for each in zip(*operands, strict=True)]
    except ZeroDivisionError as error:  # (torch divides when the program runs, and raises then)
        raise _Unknown from error


def _rows(x: torch.Tensor, dim: int) -> list[list[Any]]:
    """Return the elements along a dimension, one list for each place in the others."""
    known = _known(x)
    places = torch.arange(len(known)).reshape(tuple(x.shape)).movedim(dim, -1)
    return [[known[at] for at in row] for row in places.reshape(-1, x.shape[dim]).tolist()]


def _reduced(of: Callable[[Any, Any], Any], x: torch.Tensor, dims: Any = None, *rest: Any) -> list[Any]:
    """Return the elements of a sum, a product or an extreme over all dimensions, or one of them."""
    dims = [] if dims is None else [dims] if isinstance(dims, int) else list(dims)
    if x.numel() == 0 or len(dims) > 1 or (dims and x.dim() == 0):
        raise _Unknown
    return [functools.reduce(of, row) for row in (_rows(x, dims[0]) if dims else [_known(x)])]


def _summed_up(x: torch.Tensor, dim: int) -> list[Any]:
    if x.dim() != 1:
        raise _Unknown
    sums: list[Any] = []
    for n in _known(x):
        sums.append(sums[-1] + n if sums else n)
    return sums

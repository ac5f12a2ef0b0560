"""Fake implementations of operators whose sizes depend on values: sizes are symbols with bounds."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException


@contextlib.contextmanager
def _fakes_of_unknown_sizes() -> Iterator[None]:
    """Fake implementations of operators of which torch has none, with sizes that are symbols where they depend on values."""
    from torch._subclasses.fake_impls import op_implementations_dict

    aten = torch.ops.aten
    ours = {aten._ctc_loss.default: _fake_ctc, aten._ctc_loss.Tensor: _fake_ctc, aten.linalg_lstsq.default: _fake_lstsq}
    ours |= {o: _fake_ctc_backward for o in (aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor)}
    ours = {target: fake for target, fake in ours.items() if target not in op_implementations_dict}
    selecting = (aten.nonzero.default, aten.masked_select.default)
    theirs = {target: op_implementations_dict[target] for target in selecting}
    op_implementations_dict.update(ours)
    op_implementations_dict.update({target: _bounded(fake) for target, fake in theirs.items()})
    try:
        yield
    finally:
        for target in ours:
            del op_implementations_dict[target]
        op_implementations_dict.update(theirs)


# How large the sizes can be that the fake implementations of `selecting` operators make, by symbol. (Torch itself bounds none by two or
# less, and forgets that a mask may be larger than what it selects from.)
_bounds: weakref.WeakKeyDictionary[Any, dict[Any, int]] = weakref.WeakKeyDictionary()


def _bounded(fake: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(fake_mode: Any, func: Any, *tensors: Any, **named: Any) -> Any:
        selected = fake(fake_mode, func, *tensors, **named)
        shape = torch.broadcast_shapes(*(t.shape for t in (*tensors, *named.values())))
        if isinstance(selected.shape[0], torch.SymInt) and all(isinstance(n, int) for n in shape):
            _bounds.setdefault(fake_mode.shape_env, {})[selected.shape[0].node.expr] = math.prod(shape)
        return selected

    return bounded


def _unknown_size(fake_mode: Any) -> Any:
    from torch.fx.experimental.symbolic_shapes import _constrain_range_for_size

    with (
        fake_mode.shape_env.ignore_fresh_unbacked_symbols()
    ):  # (torch looks for it among the results of whoever calls the operator)
        size = fake_mode.shape_env.create_unbacked_symint()
    _constrain_range_for_size(size)
    return size


def _fake_ctc(fake_mode: Any, func: Any, log_probs: Any, *rest: Any, **named: Any) -> Any:
    time, batch, _ = log_probs.shape
    return log_probs.new_empty(batch), log_probs.new_empty(batch, time, _unknown_size(fake_mode))


def _fake_ctc_backward(fake_mode: Any, func: Any, grad: Any, log_probs: Any, *rest: Any, **named: Any) -> Any:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _fake_lstsq(fake_mode: Any, func: Any, a: Any, b: Any, rcond: Any = None, *, driver: str | None = None) -> Any:
    if (driver or ("gels" if a.device.type == "cuda" else "gelsy")) != "gelsy":
        raise DynamicOutputShapeException(func)
    vector = b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1])
    shape = (
        (*a.shape[:-2], a.shape[-1])
        if vector
        else (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-1], b.shape[-1])
    )
    none = a.new_empty(_unknown_size(fake_mode))
    return a.new_empty(shape), none, a.new_empty(a.shape[:-2], dtype=torch.int64), a.new_empty(0)


def largest(size: Any) -> int | None:
    """The largest number that a symbolic size can be, None where nothing bounds it."""
    from torch.utils._sympy.value_ranges import bound_sympy

    known = _bounds.get(size.node.shape_env, {})
    if size.node.expr in known:
        return known[size.node.expr]
    upper = bound_sympy(size.node.expr, size.node.shape_env.var_to_range).upper
    return int(upper) if upper.is_finite and int(upper) < 1 << 40 else None

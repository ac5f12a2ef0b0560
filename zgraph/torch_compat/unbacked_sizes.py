"""Fake implementations of operators whose sizes depend on values: these sizes are symbols with bounds. Also a loss to
which torch gives a wrong size."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def _fakes_of_unknown_sizes() -> Iterator[None]:
    """Register fake implementations for operators that have none in torch, with symbols for sizes that depend on
    values."""
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
        with _right_label_losses():
            yield
    finally:
        for target in ours:
            del op_implementations_dict[target]
        op_implementations_dict.update(theirs)


@contextlib.contextmanager
def _right_label_losses() -> Iterator[None]:
    """Replace torch's decomposition of MultiLabelMarginLoss.

    It counts the labels behind the first -1 as class 0, and returns a vector of one element for the loss of one sample.
    """
    target = torch.ops.aten.multilabel_margin_loss_forward.default
    key = torch._C.DispatchKey.Autograd
    theirs = target.py_kernels.get(key)
    if theirs is None:
        yield
        return
    target.py_kernels[key] = _label_loss
    target._dispatch_cache.clear()
    try:
        yield
    finally:
        target.py_kernels[key] = theirs
        target._dispatch_cache.clear()


def _label_loss(input: torch.Tensor, target: torch.Tensor, reduction: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch._check(
        target.shape == input.shape,
        lambda: f"inconsistent target size: {target.shape} for input of size: {input.shape}",
    )
    rows, labels = torch.atleast_2d(input), torch.atleast_2d(target)
    counts = (labels == -1).cumsum(-1) == 0  # a label counts until the first -1
    label = torch.where(counts, labels, 0)
    classes = torch.arange(rows.shape[1], device=labels.device)
    is_target = ((classes == label.unsqueeze(-1)) & counts.unsqueeze(-1)).any(1)
    margins = (1 - rows.gather(1, label).unsqueeze(-1) + rows.unsqueeze(1)).relu() / rows.shape[1]
    losses = torch.where(counts.unsqueeze(-1) & ~is_target.unsqueeze(1), margins, 0).sum((1, 2))
    loss = losses.mean() if reduction == 1 else losses.sum() if reduction == 2 or input.dim() < 2 else losses
    return loss, is_target.to(input.dtype).reshape(target.shape)


# The upper bound of each symbol that the fake implementations of `selecting` operators make. (Torch itself sets no
# bound of two or less, and ignores that a mask may be larger than what it selects from.)
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
    ):  # (torch requires a new symbol in the results of the operator's caller)
        size = fake_mode.shape_env.create_unbacked_symint()
    _constrain_range_for_size(size)
    return size


def _fake_ctc(fake_mode: Any, func: Any, log_probs: Any, *rest: Any, **named: Any) -> Any:
    time, batch, _ = log_probs.shape
    return log_probs.new_empty(batch), log_probs.new_empty(batch, time, _unknown_size(fake_mode))


def _fake_ctc_backward(fake_mode: Any, func: Any, grad: Any, log_probs: Any, *rest: Any, **named: Any) -> Any:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _fake_lstsq(fake_mode: Any, func: Any, a: Any, b: Any, rcond: Any = None, *, driver: str | None = None) -> Any:
    driver = driver or ("gels" if a.device.type == "cuda" else "gelsy")
    rows, columns, batch = a.shape[-2], a.shape[-1], a.shape[:-2]
    vector = b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1])
    if not vector:
        batch = torch.broadcast_shapes(batch, b.shape[:-2])
    squares = (*batch, 1 if vector else b.shape[-1])
    # (A matrix without full rank has no residuals either; the region raises then.)
    residuals = a.new_empty(squares if rows > columns and driver != "gelsy" else (0,))
    ranks = a.new_empty((0,) if driver == "gels" else batch, dtype=torch.int64)
    singular = a.new_empty((0,) if driver in ("gels", "gelsy") else (*batch, min(rows, columns)))
    return a.new_empty((*batch, columns) if vector else (*batch, columns, b.shape[-1])), residuals, ranks, singular


def largest(size: Any) -> int | None:
    """Return the largest number that a symbolic size can be, None where nothing bounds it."""
    from torch.utils._sympy.value_ranges import bound_sympy

    known = _bounds.get(size.node.shape_env, {})
    if size.node.expr in known:
        return known[size.node.expr]
    upper = bound_sympy(size.node.expr, size.node.shape_env.var_to_range).upper
    return int(upper) if upper.is_Integer and int(upper) < 1 << 40 else None

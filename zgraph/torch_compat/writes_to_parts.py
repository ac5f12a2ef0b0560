"""Writes to parts of tensors that are divided over ranks (`weight[2].fill_(0)`, `weight[1:3] = 0`, `weight.diagonal().add_(1)`).

Where a view takes rows out of the dimension that is divided, torch gathers them: what seems a view of the weight is a copy of
its own, and what is written there is lost without a word. Such a write is refused here. As long as a copy is there, all operators that
write in place are looked at; when none is left, they are torch's own again, and cost what they do there.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from zgraph.errors import ModelError
from zgraph.torch_compat.dtensors import local_of
from zgraph.torch_compat.operators_of_shards import (
    Treatment,
    as_torch_does,
    is_divided,
    is_of_a_model,
    table,
    with_strategies,
)
from zgraph.torch_compat.whole_operands import else_on_whole

aten = torch.ops.aten
_VIEWS = (
    *(aten.select.int, aten.slice.Tensor, aten.diagonal.default),
    *(aten.split.Tensor, aten.split_with_sizes.default),
)
_NO_WRITES = (aten.detach_.default,)  # (whatever their schemas say)
_NOT_OF_ALL = (aten.unbind.int, aten.view.default, aten._unsafe_view.default)
"""Views that torch has for other dimensions than the divided one, or for rows that divide evenly."""
_copies: list[tuple[StorageWeakRef, torch.Size]] = []
"""The memory of what was gathered for a view, and the sizes of what it was gathered of."""
_under: dict[Any, Any] = {}
"""While there are copies: the entries of torch's table, or None, of the operators that are looked at."""


def _view(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Take a view as torch does, and remember it if it is a copy."""
    given: DTensor = args[0]
    if not is_of_a_model(given) or not is_divided(given):
        return as_torch_does(operator, args, kwargs)
    result = (else_on_whole if operator in _NOT_OF_ALL else as_torch_does)(operator, args, kwargs)
    theirs = local_of(given).untyped_storage()._cdata
    taken = [local_of(t).untyped_storage() for t in tree_leaves(result)]
    copies = [(StorageWeakRef(memory), given.shape) for memory in taken if memory._cdata != theirs]
    if copies:
        _forget_what_is_gone()
        _copies.extend(copies)
        _look_at_writes()
    return result


def _forget_what_is_gone() -> None:
    _copies[:] = [(memory, sizes) for memory, sizes in _copies if not memory.expired()]


def _look_at_writes() -> None:
    known = table()
    for operator in _in_place():
        if known.get(operator) is not _write:
            _under[operator] = known.get(operator)
            known[operator] = _write


def _leave_writes() -> None:
    for operator, treatment in _under.items():
        if treatment is None:
            table().pop(operator, None)
        else:
            table()[operator] = treatment
    _under.clear()


@functools.cache
def _in_place() -> tuple[Any, ...]:
    """Return the operators that DTensors have and that write to their first argument."""
    known = {*with_strategies(), *table()}
    return tuple(o for o in known if (first := o._schema.arguments[:1]) and first[0].is_write and o not in _NO_WRITES)


def _write(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Write in place, but not to a copy."""
    here = {local_of(t).untyped_storage()._cdata for t in tree_leaves(args[0]) if isinstance(t, DTensor)}
    _forget_what_is_gone()
    for memory, sizes in _copies:
        if memory.cdata in here:
            raise ModelError(
                f"{operator.overloadpacket.__name__} writes to a part of a tensor that is divided over the ranks",
                why=f"a view of {tuple(sizes)} that takes a part of the dimension which is divided is gathered: it is a copy, and what is written "
                "there is lost",
                hint="write inside zgraph.full_weights(model, write=True), where weights are whole; to the whole tensor, as by "
                "weight.masked_fill_(mask, 0) or weight.mul_(mask); or before zgraph.compile",
            )
    _leave_writes()
    try:
        return operator(*args, **kwargs)
    finally:
        if _copies:
            _look_at_writes()


def _fill(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Fill with a number that is in a tensor, which torch's DTensors do with a plain number alone."""
    given, value = args
    if isinstance(value, DTensor):
        return as_torch_does(operator, args, kwargs)
    return aten.fill_.Scalar(given, value.item())


def _eye(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Write an identity: torch writes one for each rank's own part, and makes that as large as the whole."""
    out = kwargs["out"]
    whole = torch.eye(*args, dtype=out.dtype, device=local_of(out).device)
    if whole.shape != out.shape:
        raise ModelError(
            f"torch.eye of {tuple(whole.shape)} is written to a tensor of {tuple(out.shape)}",
            why="it is divided over the ranks, and stays as large as it is",
            hint="give it a tensor of the identity's shape",
        )
    everywhere = [Replicate()] * out.device_mesh.ndim
    return out.copy_(DTensor.from_local(whole, out.device_mesh, everywhere, run_check=False))


WRITES: dict[Any, Treatment] = {
    **dict.fromkeys((*_VIEWS, *_NOT_OF_ALL), _view),
    aten.fill_.Tensor: _fill,
    aten.eye.m_out: _eye,
}
"""Parts of divided tensors are not written to where that would be lost."""

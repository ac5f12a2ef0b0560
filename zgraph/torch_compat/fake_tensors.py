"""Fake tensors made without running an operator, and what torch knows of them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch

MOST_KNOWN = 4096  # the most elements of a tensor whose values are known during tracing

_aten = torch.ops.aten
_COUNTING = (_aten.arange.default, _aten.arange.start, _aten.arange.start_step)


def empty(mode: Any, size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a new fake tensor of a mode, in a fifth of the time of `torch.empty_strided`, which is dispatched to the
    mode."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._mode_utils import no_dispatch

    with no_dispatch():
        return FakeTensor(mode, torch.empty_strided(size, stride, dtype=dtype, device="meta"), device)


def is_fake(tensor: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import is_fake as _is_fake

    return bool(_is_fake(tensor))


def view_of(like: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
    """Return a fake tensor like another one, in the memory of a third; None for memory of its own."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._mode_utils import no_dispatch

    assert isinstance(like, FakeTensor)
    with no_dispatch():
        if memory is None:
            elements = like.untyped_storage().nbytes() // like.element_size()
            memory = torch.empty(elements, dtype=like.dtype, device="meta")
        of_type = memory if memory.dtype is like.dtype else memory.view(like.dtype)
        inner = of_type.as_strided(like.size(), like.stride(), like.storage_offset())
        return FakeTensor(like.fake_mode, inner, like.device, constant=like.constant)


@contextlib.contextmanager
def held_after() -> Iterator[list[torch.Tensor]]:
    """Yield a list that, once the block has ended, has the fake tensors made in it that are still alive (the user's
    code keeps them)."""
    fakes: list[torch.Tensor] = []
    before = _found()  # (held to the end, so that no id is given twice)
    known_ids = {id(x) for x in before}
    yield fakes
    if any(id(x) not in known_ids for x in _found()):  # (to look for cycles takes longer, and is only needed then)
        gc.collect()
        fakes += [x for x in _found() if id(x) not in known_ids]


def _found() -> list[torch.Tensor]:
    from torch._subclasses.fake_tensor import FakeTensor

    kinds = {FakeTensor, *FakeTensor.__subclasses__()}
    return [x for x in gc.get_objects() if type(x) in kinds]


def forget_results() -> None:
    """Clear torch's cache of operators on fake tensors, for the whole process."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    FakeTensorMode.cache_clear()


def _on_cpu(options: Mapping[str, Any]) -> bool:
    return torch.device(options.get("device") or "cpu").type == "cpu"


@contextlib.contextmanager
def known_values(known: bool) -> Iterator[None]:
    """Let fake tensors know the values of what is computed from inputs of `known` values alone. (By itself torch knows
    single numbers.)"""
    from torch._subclasses import fake_tensor
    from torch.utils._mode_utils import no_dispatch

    if not known:
        yield
        return
    limit, dispatch = fake_tensor.CONSTANT_NUMEL_LIMIT, fake_tensor.FakeTensorMode.dispatch

    def dispatched(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _COUNTING and all(type(a) is int for a in args) and _on_cpu(kwargs or {}):
            with no_dispatch():
                tensor = func(*args, **(kwargs or {}))
            if mode.may_turn_const(tensor):
                return mode.fake_tensor_converter.from_real_tensor(mode, tensor, make_constant=True)
        return dispatch(mode, func, types, args, kwargs)

    fake_tensor.CONSTANT_NUMEL_LIMIT = MOST_KNOWN
    fake_tensor.FakeTensorMode.dispatch = dispatched  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        fake_tensor.CONSTANT_NUMEL_LIMIT = limit
        fake_tensor.FakeTensorMode.dispatch = dispatch  # type: ignore[method-assign]

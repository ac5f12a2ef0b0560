"""Fake tensors that are made without asking an operator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

MOST_KNOWN = 4096  # elements of a tensor whose values are known while it is traced


def empty(mode: Any, size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new fake tensor of a mode: a fifth of the time of `torch.empty_strided`, which is dispatched to the mode."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._mode_utils import no_dispatch

    with no_dispatch():
        return FakeTensor(mode, torch.empty_strided(size, stride, dtype=dtype, device="meta"), device)


def forget_results() -> None:
    """Let go of what torch remembers of operators on fake tensors, for the whole process."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    FakeTensorMode.cache_clear()


@contextlib.contextmanager
def known_values(known: bool) -> Iterator[None]:
    """Where values of inputs are `known`, let fake tensors know those of what is computed of them alone. (By itself torch knows single numbers.)"""
    from torch._subclasses import fake_tensor

    limit = fake_tensor.CONSTANT_NUMEL_LIMIT
    fake_tensor.CONSTANT_NUMEL_LIMIT = MOST_KNOWN if known else limit
    try:
        yield
    finally:
        fake_tensor.CONSTANT_NUMEL_LIMIT = limit

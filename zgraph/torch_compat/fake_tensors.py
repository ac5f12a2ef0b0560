"""Fake tensors that are made without asking an operator."""

from __future__ import annotations

from typing import Any

import torch


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

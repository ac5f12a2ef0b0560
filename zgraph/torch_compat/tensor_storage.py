"""Storages and versions of tensors."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes


def holders(tensor: torch.Tensor) -> int:
    """Return the number of tensors that share this one's storage, itself included."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1  # (minus the storage object made here)


def has_storage(tensor: torch.Tensor) -> bool:
    return bool(torch._C._has_storage(tensor))  # type: ignore[attr-defined]


def weak_storage(tensor: torch.Tensor) -> Any:
    """Return a weak reference to a tensor's storage; while it lives, no other storage has the same `storage_key`."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether several elements of this tensor are known to share an address."""
    return torch._debug_has_internal_overlap(tensor) == 1  # type: ignore[attr-defined,no-any-return]


def storage_address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 where there is none (a sparse tensor, a subclass around others)."""
    around_others = isinstance(tensor, DTensor)  # (a DTensor has a storage, but torch refuses to give its address)
    return tensor.untyped_storage().data_ptr() if has_storage(tensor) and not around_others else 0


def version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to in place, by autograd's count; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's storage (a fake one too) while any tensor on it lives."""
    return int(tensor.untyped_storage()._cdata)


def elements_are_apart(tensor: torch.Tensor) -> bool:
    """Return whether each element of this tensor is known to have an address of its own. (False for expanded tensors
    and for those with gaps.)"""
    return tensor.is_contiguous() or torch._debug_has_internal_overlap(tensor) == 0  # type: ignore[attr-defined]


def land(values: Iterable[torch.Tensor]) -> None:
    """Wait for transfers whose results nobody reads; torch keeps them and their buffers until someone waits.

    For finalisers: these run anywhere, also during tracing, and when the process group may be gone.
    """
    if sys.is_finalizing():
        return
    with contextlib.suppress(RuntimeError), _disable_current_modes():
        for value in values:
            torch.ops._c10d_functional.wait_tensor(value)

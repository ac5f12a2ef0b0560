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
    """How many tensors there are on this one's storage, itself among them."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1  # (the storage object here)


def has_storage(tensor: torch.Tensor) -> bool:
    return bool(torch._C._has_storage(tensor))  # type: ignore[attr-defined]


def weak_storage(tensor: torch.Tensor) -> Any:
    """A weak reference to a tensor's storage: while it lives no other storage has its `storage_key`."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether several elements of this tensor are known to be at one address."""
    return torch._debug_has_internal_overlap(tensor) == 1  # type: ignore[attr-defined,no-any-return]


def storage_address(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage; 0 where there is none (a sparse tensor, a subclass around others)."""
    around_others = isinstance(tensor, DTensor)  # (it has a storage, whose address torch refuses to give)
    return tensor.untyped_storage().data_ptr() if has_storage(tensor) and not around_others else 0


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was written to in place, as autograd counts. (It does not for what was made in inference mode.)"""
    return 0 if tensor.is_inference() else tensor._version


def storage_key(tensor: torch.Tensor) -> int:
    """A number of a tensor's storage (which a fake one has too), the same for all tensors on it while one of them lives."""
    return int(tensor.untyped_storage()._cdata)


def elements_are_apart(tensor: torch.Tensor) -> bool:
    """Is each element of this tensor known to be at an address of its own? (Not so of an expanded one, nor of one with gaps.)"""
    return tensor.is_contiguous() or torch._debug_has_internal_overlap(tensor) == 0  # type: ignore[attr-defined]


def land(values: Iterable[torch.Tensor]) -> None:
    """Wait for transfers that nobody reads: torch holds them and their buffers until someone has. For finalisers: those
    run anywhere, while somebody traces too, and when the process group may be gone."""
    if sys.is_finalizing():
        return
    with contextlib.suppress(RuntimeError), _disable_current_modes():
        for value in values:
            torch.ops._c10d_functional.wait_tensor(value)

"""Methods of tensors that torch's DTensors have otherwise than plain tensors, or not at all.

They are replaced as long as a compiled model lives, and treat tensors on meshes of such models alone otherwise than torch does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from zgraph.torch_compat.gradients_of_whole_tensors import averaging
from zgraph.torch_compat.numbers_of_shards import reading

_METHODS = {"full_tensor": averaging, "to_local": averaging, "numpy": reading, "tolist": reading}
"""What makes the method that stands in for torch's."""
_owners: set[int] = set()
"""The ids of the objects for which the methods are replaced now."""
_of_torch: dict[str, Callable[..., Any] | None] = {}
"""While there are any: DTensor's own methods; None where it has that of all tensors."""


def replace_methods(owner: Any) -> None:
    """While `owner` lives, treat tensors on a compiled model's mesh as these say."""
    if not _owners:
        for name, replacing in _METHODS.items():
            _of_torch[name] = vars(DTensor).get(name)
            setattr(DTensor, name, replacing(getattr(DTensor, name)))
    _owners.add(id(owner))
    weakref.finalize(owner, _leave, id(owner)).atexit = False


def _leave(owner: int) -> None:
    _owners.discard(owner)
    if not _owners:
        for name, method in _of_torch.items():
            if method is None:
                delattr(DTensor, name)
            else:
                setattr(DTensor, name, method)
        _of_torch.clear()

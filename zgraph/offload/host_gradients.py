"""Defines tensors of the device whose values are in the host's memory: offloaded gradients, which the user finds on the
device of their parameters.

An operator on one runs on the host, and its result goes to the device; writes and views stay on the host, and so does a
copy. So `.grad` can be read, clipped and added to, and takes no memory of the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

HOST = torch.device("cpu")


class Away(torch.Tensor):
    """A tensor of `device` whose values are those of `home`, a tensor of the host."""

    home: torch.Tensor

    @staticmethod
    def __new__(cls, home: torch.Tensor, device: torch.device) -> Away:
        wrapper = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, home.size(), strides=home.stride(), dtype=home.dtype, device=device
        )
        wrapper.home = home
        return wrapper  # type: ignore[no-any-return]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Away({self.home!r}, device={str(self.device)!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = next(x.device for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Away))
        written = _written(func, args, kwargs)
        if any(not isinstance(x, Away) for x in written):
            return func(*_mapped(args, _on_device), **_mapped(kwargs, _on_device))
        output = func(*_mapped(args, _on_host), **_mapped(kwargs, _on_host))
        if written:
            return written[0] if func._schema.returns else None
        if func is torch.ops.aten.clone.default or any(r.alias_info is not None for r in func._schema.returns):
            return _mapped(output, lambda x: Away(x, device))
        return _mapped(output, lambda x: x.to(kwargs.get("device") or device))


def storage_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds a tensor's values: its `home` if it is `Away`, else itself."""
    return tensor.home if isinstance(tensor, Away) else tensor


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return storage_of(tensor).to(HOST)


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.home.to(tensor.device) if isinstance(tensor, Away) else tensor


def _mapped(values: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return pytree.tree_map_only(torch.Tensor, function, values)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operator writes to."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    slots = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [x for s in slots for x in pytree.tree_leaves(given.get(s)) if isinstance(x, torch.Tensor)]

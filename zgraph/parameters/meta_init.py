"""Initialize a model that was built on the meta device: whole, one module at a time, of which only shards stay."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zgraph.errors import ModelError
from zgraph.parameters.shards import Shards
from zgraph.torch_compat.dtensors import local_of

if TYPE_CHECKING:
    pass


def initialize_meta_tensors(shards: Shards, device: torch.device, seed: int, elsewhere: Collection[str]) -> None:
    """Initialise tensors on the meta device through each module's own initialisation, and keep only shards.

    Every module is initialised whole on every rank, from a seed of its own, so the values depend neither on the world
    size nor on the order of modules; the whole tensors live only until they are cut.
    """
    root = shards.module
    names = {id(p): n for n, p in shards.params().items()}
    initializers = _initializers(root)
    # (without a mesh the whole tensor stays)
    scratch = _Scratch(device, _largest(root, names, elsewhere)) if shards.mesh is not None else None
    for path, child in root.named_modules():
        params = {k: p for k, p in child._parameters.items() if p is not None and (p.is_meta or isinstance(p, DTensor))}
        if _is_elsewhere(child, params, names, elsewhere):
            continue
        buffers = {k: b for k, b in child._buffers.items() if b is not None and b.is_meta}
        if not buffers and not any(p.is_meta for p in params.values()):
            continue
        if scratch is not None:
            scratch.begin()
        for key, param in params.items():
            unset = scratch.take(param).fill_(_sentinel(param.dtype)) if scratch is not None else _unset(param, device)
            child._parameters[key] = nn.Parameter(unset, requires_grad=param.requires_grad)
            del unset
        for key, buffer in buffers.items():
            child._buffers[key] = _unset(buffer, device)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
            torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{path}".encode()).digest()[:7], "little"))
            if callable(getattr(child, "reset_parameters", None)):
                child.reset_parameters()
            if (initialize := initializers[path]) is not None:
                initialize(child)
        for key, old in params.items():
            whole = child._parameters[key]
            child._parameters[key] = old
            assert whole is not None
            if isinstance(old, DTensor) or names[id(old)] in elsewhere:
                continue  # (tied to a parameter that has its values, or stored by another stage)
            if _is_unset(whole.detach()):
                shards.pending.add(names[id(old)])
            shards.install(names[id(old)], whole.detach())
        for key in buffers:
            registered = child._buffers[key]
            if registered is not None and _is_unset(registered):
                name = f"{path}.{key}" if path else key
                if key in child._non_persistent_buffers_set:
                    raise ModelError(
                        f"buffer {name!r} of a model on the meta device can't be given its values",
                        why=f"{type(child).__name__} has no reset_parameters that sets it, and checkpoints don't hold it",
                        hint="let reset_parameters set it, or build the model on a real device",
                    )
                shards.pending.add(name)


def _is_elsewhere(
    child: nn.Module, params: Mapping[str, nn.Parameter], names: Mapping[int, str], elsewhere: Collection[str]
) -> bool:
    """Return whether other stages have all that there is to initialise in a module."""
    return (
        bool(params)
        and all(names.get(id(p)) in elsewhere for p in params.values())  # (no name: tied, and replaced already)
        and not any(b is not None and b.is_meta for b in child._buffers.values())
    )


def _largest(root: nn.Module, names: Mapping[int, str], elsewhere: Collection[str]) -> int:
    """Return the bytes of the parameters of the module that has the most to initialise."""
    largest = 0
    for child in root.modules():
        params = {key: p for key, p in child._parameters.items() if p is not None and p.is_meta}
        if not _is_elsewhere(child, params, names, elsewhere):
            largest = max(largest, sum(map(_padded_bytes, params.values())))
    return largest


def _initializers(root: nn.Module) -> dict[str, Callable[[nn.Module], None] | None]:
    """Return for each module, by path, the `_init_weights` that initialises it: that of the root, and within a model of transformers
    inside of it (the vision tower of a model of language and vision) that model's own."""
    initializers: dict[str, Callable[[nn.Module], None] | None] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        own = getattr(module, "_init_weights", None)
        if path and not hasattr(type(module), "_initialize_weights"):
            own = initializers[path.rpartition(".")[0]]
        initializers[path] = own if callable(own) else None
    return initializers


def still_unset(shards: Shards) -> Iterator[str]:
    """Yield the pending names whose values have not been loaded yet."""
    tensors = {**dict(shards.module.named_buffers()), **shards.params()}
    for name in sorted(shards.pending):
        tensor = tensors[name]
        local = local_of(tensor)
        if _is_unset(local.detach()):
            yield name


class _Scratch:
    """Memory for one module's whole parameters, of `nbytes` at most, reused for the next module's.

    Allocated and freed in turn with the shards that stay, wholes would leave a heap of holes: glibc kept 1.3 GB where
    0.2 GB of shards were left (tests/parameters/test_meta.py), and 0.1 GB of holes where modules of other sizes got memory of their own.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._used = 0

    def begin(self) -> None:
        """Start again, for the next module."""
        self._used = 0

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor of this type and layout, uninitialised."""
        room = self._bytes[self._used : self._used + like.numel() * like.element_size()]
        self._used += _padded_bytes(like)
        return room.view(like.dtype).as_strided(like.shape, like.stride(), room.storage_offset() // like.element_size())


def _padded_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // 64) * 64


def _unset(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a real tensor of this type, filled with a value that means "not initialised"."""
    unset = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    return unset.fill_(_sentinel(like.dtype))


def _sentinel(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype is torch.bool else torch.iinfo(dtype).min


def _is_unset(tensor: torch.Tensor) -> bool:
    if tensor.dtype is torch.bool or not tensor.numel():
        return False
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(torch.isnan(tensor.sum()))  # (one number, and no mask of the tensor's size)
    return bool((tensor.min() == _sentinel(tensor.dtype)).item())

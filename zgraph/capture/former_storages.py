"""Tensors in the memory that a parameter had before it was replaced by its shard.

A model may hold a parameter a second time without registering it: in a list, as a slice, as `.data`. In plain PyTorch these read the
parameter as it is now. Once it is replaced they lie in memory that no update writes to any more, so a capture turns each into an
expression of the parameter: `weight[:2]` is computed from the gathered weight, and its gradient goes to the weight.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from zgraph.capture.storages import overlap
from zgraph.errors import ModelError, StepError, UnsupportedError
from zgraph.torch_compat import tensor_storage

_TIE = "let both be one Parameter (b.weight = a.weight), or make a copy: tensor.clone()"


@dataclass(frozen=True)
class Former:
    """The place that a parameter had before it was replaced: its object, and its part of the storage."""

    name: str  # the parameter's name
    param: weakref.ref[nn.Parameter]  # the parameter's former object
    storage: Any  # a weak reference to its storage, so that no other storage gets its number
    form: torch.Tensor  # a meta tensor with the parameter's former sizes, strides and offset


class FormerStorages:
    """The former places of all replaced parameters of one module."""

    def __init__(self) -> None:
        self._by_storage: dict[int, list[Former]] = {}
        self._early: set[str] = set()  # parameters that count as replaced even if they were not
        self.is_read = False  # whether a capture has found a tensor in it

    def note(self, name: str, param: nn.Parameter) -> None:
        """Remember where a parameter is, before it is replaced."""
        if not tensor_storage.has_storage(param):
            return
        form = torch.empty(0, dtype=param.dtype, device="meta")
        form = form.as_strided(param.shape, param.stride(), param.storage_offset())
        there = self._by_storage.setdefault(tensor_storage.storage_key(param), [])
        if not any(f.name == name and f.param() is param and _same_form(f.form, form) for f in there):
            there.append(Former(name, weakref.ref(param), tensor_storage.weak_storage(param), form))

    def note_early(self, module: nn.Module) -> Callable[[], None]:
        """Let all parameters of a module count as replaced from now on, and return a function that undoes this.

        What shares memory with a parameter is then read from it, on each rank alike.
        """
        before = {key: list(group) for key, group in self._by_storage.items()}, self._early, self.is_read
        self._early = {name for name, _ in module.named_parameters()}
        for name, param in module.named_parameters():
            self.note(name, param)

        def undo() -> None:
            self._by_storage, self._early, self.is_read = before

        return undo

    def forget_if_there(self, name: str, param: nn.Parameter) -> None:
        """Forget where a parameter was if it is still there."""
        key = tensor_storage.storage_key(param) if tensor_storage.has_storage(param) else None
        if key in self._by_storage and name not in self._early:
            self._by_storage[key] = [f for f in self._by_storage[key] if f.name != name]
            if not self._by_storage[key]:
                del self._by_storage[key]

    @property
    def is_empty(self) -> bool:
        return not self._by_storage

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the storage of a replaced parameter."""
        if not self._by_storage or not tensor_storage.has_storage(tensor):
            return False
        return tensor_storage.storage_key(tensor) in self._by_storage

    def former_of(self, tensor: torch.Tensor, what: str) -> Former | None:
        """Return the replaced parameter in whose former memory a tensor is stored; None if there is none.

        Raises `UnsupportedError` if only a part of it is stored there, or with another dtype.
        """
        if not self.holds(tensor):
            return None
        mine = _extent(tensor)
        there = [f for f in self._by_storage[tensor_storage.storage_key(tensor)] if overlap(mine, _extent(f.form))]
        if not there:
            return None
        last = there[-1]  # (the others are of earlier layouts)
        at = _extent(last.form)
        if last.form.dtype is not tensor.dtype or not (at[0] <= mine[0] and mine[1] <= at[1]):
            raise UnsupportedError(
                f"{what} shares the memory of parameter {last.name!r}, but not as a part of it",
                why="the parameter was replaced by its shard, and what is read here would stay as it was"
                if last.form.dtype is tensor.dtype
                else f"it reads {_short(last.form.dtype)} as {_short(tensor.dtype)}",
                hint=f"read the parameter itself in forward, or {_TIE}",
            )
        return last

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """Make the former objects `nn.Parameter`s again while inside, so that a capture can read them."""
        changed = []
        for former in (f for group in self._by_storage.values() for f in group):
            param = former.param()
            if param is not None and type(param) is not nn.Parameter:
                changed.append((param, type(param)))
                param.__class__ = nn.Parameter
        try:
            yield
        finally:
            for param, kind in changed:
                param.__class__ = kind


_KNOWN: weakref.WeakKeyDictionary[nn.Module, FormerStorages] = weakref.WeakKeyDictionary()


def former_storages(module: nn.Module) -> FormerStorages:
    """Return the `FormerStorages` of this module."""
    return _KNOWN.setdefault(module, FormerStorages())


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the offsets in bytes of a tensor's first byte in its storage, and of the one after its last."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    return first * tensor.element_size(), (first + last + 1) * tensor.element_size()


def _same_form(one: torch.Tensor, other: torch.Tensor) -> bool:
    forms = [(t.dtype, t.shape, t.stride(), t.storage_offset()) for t in (one, other)]
    return forms[0] == forms[1]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- in a capture ------------------------------------------------------------------------------------------------------
def seen_as(param: Any, former: torch.Tensor, tensor: torch.Tensor) -> list[tuple[str, tuple[Any, ...]]]:
    """Return the (method, arguments) calls that turn the whole parameter into what `tensor` was of its `former` memory."""
    steps: list[tuple[str, tuple[Any, ...]]] = []
    offset = int(tensor.storage_offset()) - int(former.storage_offset())
    size, stride = tuple(tensor.shape), tuple(tensor.stride())
    if (size, stride) == (tuple(former.shape), former.stride()) and not offset:
        pass
    elif (order := _permutation(former, size, stride)) is not None and not offset:
        steps.append(("permute", order))
    elif (cuts := _narrowing(former, size, stride, offset)) is not None:
        steps += [("narrow", cut) for cut in cuts]
    else:
        dims = tuple(sorted(range(former.dim()), key=lambda d: (-former.stride()[d], d)))
        if tuple(param.stride()) != former.stride() or not param.is_contiguous():
            steps += [("permute", dims), ("contiguous", ())]
        steps.append(("as_strided", (size, stride, offset)))
    if not tensor.requires_grad:
        steps.append(("detach", ()))
    return steps


def _permutation(former: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    view_dims = list(zip(size, stride, strict=True))
    former_dims = list(zip(former.shape, former.stride(), strict=True))
    if len(set(former_dims)) < len(former_dims) or sorted(view_dims) != sorted(former_dims):
        return None
    return tuple(former_dims.index(dim) for dim in view_dims)


def _narrowing(
    former: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> list[tuple[int, int, int]] | None:
    """Return (dimension, first, length) for each dimension that is cut; None if `size` and `stride` are no such cut."""
    if len(size) != former.dim() or any(
        n > 1 and s != t for n, s, t in zip(size, stride, former.stride(), strict=True)
    ):
        return None
    cuts = []
    for dim in sorted(range(len(size)), key=lambda d: -former.stride()[d]):
        step = former.stride()[dim]
        first = min(offset // step if step else 0, former.shape[dim] - size[dim])
        offset -= first * step
        if size[dim] != former.shape[dim]:
            cuts.append((dim, first, size[dim]))
    return None if offset else cuts


def insert(graph: fx.Graph, node: fx.Node, source: fx.Node, steps: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
    """Make the readers of the input `node` read the result of these methods called on `source`, another input or
    itself."""
    readers = list(node.users)
    value, behind = source, graph.find_nodes(op="placeholder")[-1]
    for name, args in steps:
        with graph.inserting_after(behind), torch.enable_grad():
            behind = graph.call_method(name, (value, *args))
        behind.meta["example_value"] = getattr(value.meta["example_value"], name)(*args)
        value = behind
    for reader in readers:
        reader.replace_input_with(node, value)


# -- at compile --------------------------------------------------------------------------------------------------------
def refuse_shared_memory(model: nn.Module, moved: Collection[str], *, updates: bool) -> None:
    """Raise `ModelError` for parameters and buffers whose memory must be their own.

    These are: a parameter whose elements overlap each other; two parameters that have elements in common, if one of
    them is `moved` to memory of its own or an update program writes them (`updates`); a buffer that has elements in
    common with a moved parameter.
    """
    params = dict(model.named_parameters())
    for name, param in params.items():
        if tensor_storage.has_storage(param) and tensor_storage.overlaps_itself(param):
            raise ModelError(
                f"several elements of parameter {name!r} are one in memory",
                why="it was expanded; PyTorch's own optimizers refuse to update it as well",
                hint="let the parameter be what was expanded, and expand it in forward; or clone it",
            )
    buffers = dict(model.named_buffers()) if moved else {}
    if moved or updates:
        for name, tensor in {**params, **buffers}.items():
            for other, param in params.items():
                if other == name and name in params:
                    break
                parts = other in moved or name in moved or (updates and name in params)
                if parts and _meet(tensor, param):
                    kind = "parameter" if name in params else "buffer"
                    raise ModelError(
                        f"{kind} {name!r} shares memory with parameter {other!r}",
                        why="each would be updated by itself, and a write to one would not reach the other",
                        hint=_TIE,
                    )


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have an element in common."""
    if not (tensor_storage.has_storage(one) and tensor_storage.has_storage(other)):
        return False
    if tensor_storage.storage_key(one) != tensor_storage.storage_key(other) or not overlap(
        _extent(one), _extent(other)
    ):
        return False
    if one.dtype is not other.dtype or (one.is_contiguous() and other.is_contiguous()):
        return True
    marks = torch.zeros(max(_extent(t)[1] for t in (one, other)) // one.element_size(), dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def moved(what: str, name: str) -> StepError:
    """Return the error for a tensor whose place has changed since the capture.

    With a `name` it was in that parameter's former memory then and is not now; without one it is in some parameter's
    former memory only now.
    """
    return StepError(
        f"{what} is another tensor than when the model was captured",
        why=f"then it lay in the memory of parameter {name!r}, from which the program reads it"
        if name
        else "it lies in the former memory of a parameter, which the model has replaced by its shard",
        hint="read the parameter itself in forward; change what shares memory with it before zgraph.compile",
    )

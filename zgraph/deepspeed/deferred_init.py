"""Models that are built without memory for their parameters, with the initialisation recorded for later.

Inside of the context, a parameter that is registered before anything was written to it is moved to the meta device, as the same object.
What is written to it there (`nn.init`, `reset_parameters`, any operator in place) is recorded, and replayed when it is materialised: by
`zgraph.compile` shard by shard, one module at a time. A parameter that has values when it is registered, and every buffer, stays as it is.
The idea is that of torchdistX's deferred initialisation.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from zgraph.errors import ModelError

_WRITES = "_zgraph_writes"  # the key of a module's __dict__ with the `Writes` to its parameters, by their names
_deferred: Any = WeakTensorKeyDictionary()  # the `Writes` to parameters that are still on the meta device
_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
}


@dataclass
class Writes:
    """The recorded writes to one parameter."""

    # in order: (operator, (size, stride, offset) of what it writes to in the storage, arguments, named arguments)
    done: list[tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...], dict[str, Any]]] = field(
        default_factory=list
    )
    whole: bool = True  # every write was recorded, so that they can be replayed

    def replay(self, param: torch.Tensor) -> None:
        """Repeat the writes on a real tensor of the parameter's layout. If one of them could not be recorded, leave
        the tensor as it is."""
        if not self.whole:
            return
        with torch.no_grad():
            for operator, (size, stride, offset), args, kwargs in self.done:
                place = param.detach().as_strided(size, stride, param.storage_offset() + offset)
                operator(place, *args, **kwargs)


class _Recorder(TorchDispatchMode):
    """The mode that knows which tensors were not written to yet, and records writes to parameters on the meta
    device."""

    def __init__(self) -> None:
        super().__init__()
        self._fresh: dict[int, StorageWeakRef] = {}
        self._of: dict[int, Writes] = {}

    def untouched(self, tensor: torch.Tensor) -> bool:
        storage = self._fresh.get(tensor.untyped_storage()._cdata)
        return storage is not None and not storage.expired()

    def writes_of(self, tensor: torch.Tensor) -> Writes | None:
        """Return the recorded writes to the parameter whose storage a tensor shares; None if it is not a deferred
        parameter's."""
        return self._of.get(tensor.untyped_storage()._cdata)

    def watch(self, param: torch.Tensor) -> Writes:
        return self._of.setdefault(param.untyped_storage()._cdata, Writes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.is_write and isinstance(value, torch.Tensor)
        ]
        for tensor in written:
            self._fresh.pop(tensor.untyped_storage()._cdata, None)
            writes = self._of.get(tensor.untyped_storage()._cdata)
            if writes is not None:
                self._record(writes, func, tensor, args, kwargs)
        result = func(*args, **kwargs)
        if func in _EMPTY:
            storage = result.untyped_storage()
            self._fresh[storage._cdata] = StorageWeakRef(storage)
        return result

    @staticmethod
    def _record(writes: Writes, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> None:
        others = [t for t in pytree.tree_leaves((args[1:], kwargs)) if isinstance(t, torch.Tensor)]
        if args[0] is not tensor or any(t.is_meta for t in others):
            writes.whole = False
            return
        rest, named = pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, (args[1:], kwargs))
        place = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        writes.done.append((func, place, tuple(rest), dict(named)))


class _Asked(TorchFunctionMode):
    """The mode that notices when an initialiser of torch skips a parameter because it is on the meta device: its
    values can't be replayed."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func == _IS_META and result and sys._getframe(1).f_code.co_filename == nn.init.__file__:
            writes = self._recorder.writes_of(args[0])
            if writes is not None:
                writes.whole = False
        return result


# Initialisers that do nothing on the meta device, wrapped in `nn.init` so that calls as `nn.init.NAME(…)` are recorded.
_PASSING = ("_no_grad_trunc_normal_", "orthogonal_", "dirac_", "sparse_")
_IS_META: Any = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


def _recorded(recorder: _Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an initialiser that records its whole call if its tensor is a deferred parameter."""

    @functools.wraps(original)
    def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        writes = recorder.writes_of(tensor) if isinstance(tensor, torch.Tensor) else None
        if writes is None:
            return original(tensor, *args, **kwargs)
        place = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        writes.done.append((original, place, args, kwargs))
        return tensor

    return run


@contextmanager
def deferred() -> Iterator[None]:
    """Build models without memory for their parameters; see the module's docstring."""
    recorder = _Recorder()
    built: list[nn.Module] = []
    original = nn.Module.register_parameter

    @functools.wraps(original)
    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if type(param) is nn.Parameter and not param.is_meta and recorder.untouched(param):
            empty = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")
            torch.utils.swap_tensors(param, nn.Parameter(empty, requires_grad=param.requires_grad))
            _deferred[param] = recorder.watch(param)
        original(module, name, param)
        if type(param) is nn.Parameter and param.is_meta:
            module.__dict__.setdefault(_WRITES, {})[name] = recorder.watch(param)
            built.append(module)

    passing = {name: getattr(nn.init, name) for name in _PASSING}
    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    for name, function in passing.items():
        setattr(nn.init, name, _recorded(recorder, function))
    try:
        with recorder, _Asked(recorder):
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
        for name, function in passing.items():
            setattr(nn.init, name, function)
        for module in built:  # (only now: constructors call the modules' own reset_parameters)
            module.__dict__["reset_parameters"] = functools.partial(replay, module)


def replay(module: nn.Module) -> None:
    """Repeat on a module's own parameters what its constructor wrote to them on the meta device."""
    for name, writes in module.__dict__.get(_WRITES, {}).items():
        param = module._parameters.get(name)
        if param is not None and not param.is_meta:
            writes.replay(param)


def materialise(param: nn.Parameter) -> None:
    """Make one parameter real on the host, with the values from its constructor. Raises `ModelError` if it was not
    built inside of `deferred`."""
    writes = _deferred.pop(param, None)
    if writes is None:
        raise ModelError(
            f"a parameter of shape {list(param.shape)} on the meta device that zero.Init has not built",
            hint="build its module inside of zero.Init, or load a state dict",
        )
    real = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="cpu")
    writes.replay(real)
    writes.done.clear()  # (so that replaying the rest of its module does not write to it again)
    torch.utils.swap_tensors(param, nn.Parameter(real, requires_grad=param.requires_grad))

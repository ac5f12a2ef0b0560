"""What a captured forward depends on that dynamo does not guard.

These are: methods and other attributes of classes, attributes that were missing, which arguments are one object, hooks
of all modules, environment variables.
"""

from __future__ import annotations

import os
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

_ABSENT = object()
_HEAP_TYPE = 1 << 9  # (other types can't be changed)
_TORCH = os.path.dirname(torch.__file__)
_HOOKS = tuple(
    getattr(nn.modules.module, f"_global_{n}_hooks") for n in ("forward", "forward_pre", "backward", "backward_pre")
)
_SET_BY_INDUCTOR = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "_TORCHINDUCTOR_")
_COMPARED = (type(None), bool, int, float, complex, str, bytes)
# (for these types it makes no difference whether two arguments are one object)
_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    tuple,
    torch.Tensor,
    torch.dtype,
    torch.device,
    type,
    types.FunctionType,
)


class UnguardedState:
    """A snapshot of what dynamo keeps no guard on, taken from the code that it traced and the objects that it guards."""

    def __init__(
        self,
        codes: Sequence[types.CodeType],
        objects: Iterable[Any],
        scope: dict[str, Any],
        changed: Sequence[tuple[Any, str]],
    ) -> None:
        """Take the snapshot. `changed` are the (object, attribute) pairs that forward itself sets."""
        self._codes = codes  # (guards know code by its address, so it must stay alive)
        names = {n for c in codes for n in c.co_names}
        objects = list({id(x): x for x in objects}.values())
        kinds = {type(x) for x in objects} | {x for x in objects if isinstance(x, type)}
        own = {(id(x), n) for x, n in changed if isinstance(x, type)}
        attributes = _class_attributes(kinds, names, set(codes))
        self._classes = [f for f in attributes if not any((id(c), f[1]) in own for c in f[0].__mro__)]
        # Code finds an attribute missing by hasattr, which dynamo guards, or by catching the error, which it does not.
        catching = {
            n for c in codes if c.co_exceptiontable and not c.co_filename.startswith(_TORCH) for n in c.co_names
        }
        tables = [
            vars(x)
            for x in objects
            if catching and not isinstance(x, (type, types.ModuleType)) and hasattr(x, "__dict__")
        ]
        self._missing = [(t, len(t), frozenset(catching - t.keys())) for t in tables]
        # Attributes looked up by a string: in a __dict__, or by getattr and hasattr, which dynamo guards for all but
        # tensors.
        user_codes = [c for c in codes if not c.co_filename.startswith(_TORCH)]
        inside = _strings(c for c in user_codes if not {"__dict__", "vars"}.isdisjoint(c.co_names))
        set_here = {n for _, n in changed}
        read = [vars(x) for x in objects if inside and hasattr(x, "__dict__") and not isinstance(x, type)]
        self._read = [(t, _plain(t, inside - set_here)) for t in read]
        by_name = _strings(c for c in user_codes if not {"getattr", "hasattr"}.isdisjoint(c.co_names))
        self._hung_names = frozenset((inside | by_name | catching) - set_here)
        self._hung: list[tuple[weakref.ref[torch.Tensor], dict[str, Any]]] | None = None  # on the model's tensors
        self._aliases = _aliases(scope)
        self._hooks = [tuple(h.values()) for h in _HOOKS]
        reads = any(c.co_filename == os.getenv.__code__.co_filename for c in codes)
        self._environment = _environment() if reads else None

    def changed(self, scope: dict[str, Any]) -> str | None:
        """Return what no longer holds, in words; None if all does."""
        for kind, name, value, get in self._classes:
            if get(kind, name) is not value:
                return f"{kind.__qualname__}.{name} is what it was"
        for table, size, names in self._missing:
            if len(table) != size and not names.isdisjoint(table):
                return f"an object has no attribute {sorted(names & table.keys())[0]!r}"
        for table, entries in self._read:
            if _plain(table, entries) != entries:
                return "an object has the attributes that it had"
        if self._hung_names and not self._hangs_as_before(scope):
            return "parameters have the attributes that they had"
        if _aliases(scope) != self._aliases:
            return "the same arguments are one object"
        for hooks, before in zip(_HOOKS, self._hooks, strict=True):
            if (hooks or before) and tuple(hooks.values()) != before:
                return "the hooks of all modules are the same"
        if self._environment is not None and self._environment != _environment():
            return "the environment variables are the same"
        return None

    def _hangs_as_before(self, scope: dict[str, Any]) -> bool:
        """Return whether the model's tensors have the attributes that forward may look for as at the first check.

        (At the capture itself they were fake.)
        """
        if self._hung is None:
            owner = next((v for v in scope.values() if isinstance(v, nn.Module)), None)
            tensors = [*owner.parameters(), *owner.buffers()] if owner is not None else []
            names = self._hung_names
            self._hung = [(weakref.ref(t), _plain(vars(t), names & vars(t).keys())) for t in tensors]
        for there, before in self._hung:
            tensor = there()
            table = vars(tensor) if tensor is not None else None
            if not table or self._hung_names.isdisjoint(table):  # (most tensors have nothing to compare)
                if before and table is not None:
                    return False
            elif _plain(table, self._hung_names & table.keys()) != before:
                return False
        return True


def _environment() -> dict[str, str]:
    """Return the environment variables, without those that Inductor sets for the processes that it starts."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_SET_BY_INDUCTOR)}


def _strings(codes: Iterable[types.CodeType]) -> frozenset[str]:
    """Return the strings among the constants of code."""
    return frozenset(v for c in codes for v in c.co_consts if isinstance(v, str))


def _plain(table: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a table's entries of these names: comparable values as they are, `...` for others, `_ABSENT` for missing
    ones."""
    entries = {n: table.get(n, _ABSENT) for n in names}
    return {n: v if v is _ABSENT or isinstance(v, _COMPARED) else ... for n, v in entries.items()}


def _class_attributes(
    kinds: set[type], names: set[str], codes: set[types.CodeType]
) -> list[tuple[type, str, Any, Callable[[type, str], Any]]]:
    """Return (class, name, value, how to get it) of what traced code may have found in a class."""
    attributes: list[tuple[type, str, Any, Callable[[type, str], Any]]] = []
    for kind in kinds:
        if not kind.__flags__ & _HEAP_TYPE:
            continue
        for name in dir(kind):
            raw = next((c.__dict__[name] for c in kind.__mro__ if name in c.__dict__), _ABSENT)
            inner = raw.fget if isinstance(raw, property) else getattr(raw, "__func__", raw)
            read = inner.__code__ in codes if isinstance(inner, types.FunctionType) else name in names
            if not read:
                continue
            if isinstance(raw, classmethod):
                attributes.append((kind, name, raw.__func__, _of_classmethod))
            elif raw is not _ABSENT and not isinstance(raw, (types.MemberDescriptorType, types.GetSetDescriptorType)):
                value = getattr(kind, name, _ABSENT)
                if value is getattr(kind, name, _ABSENT):  # (a value made anew at each read can't be compared)
                    attributes.append((kind, name, value, _get))
    return attributes


def _get(kind: type, name: str) -> Any:
    return getattr(kind, name, _ABSENT)


def _of_classmethod(kind: type, name: str) -> Any:
    return getattr(getattr(kind, name, None), "__func__", _ABSENT)


def _aliases(scope: dict[str, Any]) -> list[int]:
    """Return, for each argument, the position of the first one that is the same object."""
    values: list[Any] = []
    for value in scope.values():
        values.append(value)
        if type(value) is tuple:
            values += value
        elif type(value) is dict:
            values += value.values()
    first: dict[int, int] = {}
    return [first.setdefault(id(v), i) for i, v in enumerate(values) if not isinstance(v, _PLAIN)]

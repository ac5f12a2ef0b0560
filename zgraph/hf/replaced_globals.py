"""Replacing a few globals of a library's methods on single modules of a model, without changing the library itself."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn


@dataclass(frozen=True)
class Before:
    """The attribute of a module before it was replaced."""

    module: nn.Module  # the module
    name: str  # the attribute's name
    value: Any  # its value in the module's own __dict__; None if only its class has it

    def restore(self) -> None:
        """Restore the attribute."""
        if self.value is None:
            self.module.__dict__.pop(self.name, None)
        else:
            self.module.__dict__[self.name] = self.value


def replace(
    module: nn.Module, method: str, function: types.FunctionType, name: str, values: Mapping[str, Any]
) -> Before:
    """Replace a module's method by the function with other globals; return what was replaced.

    The globals are those of a Python module made for them, whose name begins with `name`: dynamo looks them up there.
    """
    before = Before(module, method, module.__dict__.get(method))
    names = _globals_of(name, function, values)
    own = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    own.__dict__.update(function.__dict__)
    setattr(module, method, types.MethodType(own, module))
    return before


def _globals_of(name: str, function: types.FunctionType, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the globals of a Python module, named `name` with a suffix, that has the function's globals with the
    replaced values.

    Functions of one file share it. If the globals of the file have changed since, or are those of another file, a new
    module is made.
    """
    wanted = {**function.__globals__, **values}
    file = wanted.pop("__name__")
    name = f"{name}_of_{file.replace('.', '_')}"
    number = 1
    while True:
        path = name if number == 1 else f"{name}_{number}"
        if path not in sys.modules:
            module = types.ModuleType(path)
            vars(module).update({**wanted, "__doc__": f"{file} with other {', '.join(values)}."})
            sys.modules[path] = module
            return vars(module)
        known = vars(sys.modules[path])
        if all(known.get(key, known) is value for key, value in wanted.items() if key != "__doc__"):
            return known
        number += 1


class Restorable(Protocol):
    """What is known of something before it was replaced."""

    def restore(self) -> None:
        """Put it back."""


def restore(replaced: Iterable[Restorable]) -> None:
    """Restore all that was replaced."""
    for before in replaced:
        before.restore()

"""A library's methods with a few of their globals replaced, on single modules of a model: the library itself stays as it is."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Before:
    """What a module had as an attribute of its own; `value` is None where that was its class's."""

    module: nn.Module
    name: str
    value: Any

    def restore(self) -> None:
        """Give it back."""
        if self.value is None:
            self.module.__dict__.pop(self.name, None)
        else:
            self.module.__dict__[self.name] = self.value


def replace(
    module: nn.Module, method: str, function: types.FunctionType, name: str, values: Mapping[str, Any]
) -> Before:
    """Make the function, with other globals, the module's method. They are those of a Python module of their own, whose name begins with `name`:
    dynamo looks them up there."""
    before = Before(module, method, module.__dict__.get(method))
    names = _globals_of(name, function, values)
    own = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    own.__dict__.update(function.__dict__)
    setattr(module, method, types.MethodType(own, module))
    return before


def _globals_of(name: str, function: types.FunctionType, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a Python module whose name begins with this one: functions of one file share them, and one whose globals are others (of another
    file, or of the same one since somebody changed it) has its own."""
    wanted = {**function.__globals__, **values}
    file = wanted.pop("__name__")
    name = f"{name}_of_{file.replace('.', '_')}"
    number = 1
    while True:
        path = name if number == 1 else f"{name}_{number}"
        if path not in sys.modules:
            made = types.ModuleType(path)
            vars(made).update({**wanted, "__doc__": f"{file} with other {', '.join(values)}."})
            sys.modules[path] = made
            return vars(made)
        known = vars(sys.modules[path])
        if all(known.get(key, known) is value for key, value in wanted.items() if key != "__doc__"):
            return known
        number += 1


def restore(replaced: Iterable[Before]) -> None:
    """Give all modules back what they had."""
    for before in replaced:
        before.restore()

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
    """Make the function, with other globals, the module's method. They are those of a Python module called `name`: dynamo looks them up there."""
    before = Before(module, method, module.__dict__.get(method))
    if name not in sys.modules:
        made = types.ModuleType(name, f"{function.__module__} with other {', '.join(values)}.")
        vars(made).update({**function.__globals__, **values, "__name__": name})
        sys.modules[name] = made
    names = vars(sys.modules[name])
    own = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    own.__dict__.update(function.__dict__)
    setattr(module, method, types.MethodType(own, module))
    return before


def restore(replaced: Iterable[Before]) -> None:
    """Give all modules back what they had."""
    for before in replaced:
        before.restore()

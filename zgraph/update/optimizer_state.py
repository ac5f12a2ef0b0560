"""A plan's optimizer's `state`: dicts that record when they are written to.

The update program holds the tensors; these dicts show them. Where a user replaces or removes some, the next step takes
the change over (see `States.read_back`), and looks for changes only if something was written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

_WRITERS = ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update")


class OfParam(dict[str, Any]):
    """The states of one parameter, by key."""

    def __init__(self, owner: OptimizerState, *args: Any) -> None:
        super().__init__(*args)
        self.owner = owner

    def _note(self) -> None:
        self.owner.changed = True

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class OptimizerState(defaultdict[torch.Tensor, Any]):
    """An optimizer's state, by parameter.

    Its truth value makes the states first, so that it is not empty: torch.distributed.checkpoint would else make them
    by a step. `changed` says whether anyone but the update itself has written to it or to a parameter's states.
    """

    def __init__(self, make_states: Callable[[], None] | None) -> None:
        super().__init__(lambda: OfParam(self))
        self.changed = False
        self._make_states = make_states

    def show(self, param: torch.Tensor, values: dict[str, Any]) -> OfParam:
        """Show these tensors, which are the update's own, as the states of a parameter."""
        shown = OfParam(self, values)
        dict.__setitem__(self, param, shown)
        return shown

    def show_again(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Move the states of a parameter to the object that has replaced it."""
        states = dict.pop(self, old, None)
        if states is not None:
            dict.__setitem__(self, new, states)

    def _note(self) -> None:
        self.changed = True

    def __bool__(self) -> bool:
        if self._make_states is not None:
            self._make_states()
        return len(self) > 0

    def __reduce__(self) -> Any:
        return dict, ({param: dict(states) for param, states in self.items()},)


def _noticing(write: Callable[..., Any]) -> Callable[..., Any]:
    def noticed(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._note()
        return write(self, *args, **kwargs)

    return noticed


for _kind, _base in ((OfParam, dict), (OptimizerState, defaultdict)):
    for _name in _WRITERS:
        setattr(_kind, _name, _noticing(getattr(_base, _name)))

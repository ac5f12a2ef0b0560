"""Notices when a compiled model's `forward` is replaced: on the model (`model.forward = f`), or in its class.

A function that calls the compiled forward runs around it, as the user wrote it. Any other is captured in place of the
old one.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from zgraph.errors import ModelError
from zgraph.torch_compat import autograd_state

logger = logging.getLogger(__name__)

_SEARCHED = 2000  # the most objects searched to find whether a function calls the compiled forward


def is_method(module: nn.Module, forward: Any) -> bool:
    return isinstance(forward, types.MethodType) and forward.__self__ is module


def method_of(module: nn.Module) -> Callable[..., Any]:
    """Return the function of a module's forward, which takes the module first.

    Raises `ModelError` for a forward that is not bound to the module: a copy of the module would run the original's
    weights.
    """
    if "zgraph" in module.__dict__:
        raise ModelError("the model is compiled already", hint="give the plain model, as it was before zgraph.compile")
    if not is_method(module, module.forward):
        raise ModelError(
            "the model's forward is not a method",
            why="it was replaced on the instance, and what is done here runs a copy of the model: the function holds the original",
            hint="model.forward = types.MethodType(function, model), or define forward in the model's class",
        )
    return module.forward.__func__  # type: ignore[no-any-return, attr-defined]


def unbound(module: nn.Module, forward: Any) -> Callable[..., Any]:
    """Return a forward as a function that takes the module first."""
    if is_method(module, forward):
        return forward.__func__  # type: ignore[no-any-return]

    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    called.calls = forward  # type: ignore[attr-defined]
    return called


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a result of `unbound`, with the module first.

    (It is not set on the function itself, where dynamo would take it for its code's.)
    """
    if not hasattr(function, "calls"):
        return inspect.signature(function)
    known = inspect.signature(function.calls)
    own = inspect.Parameter("zgraph_module", inspect.Parameter.POSITIONAL_ONLY)
    return known.replace(parameters=[own, *known.parameters.values()])


class Forward:
    """The forward of one compiled model.

    `run` takes the arguments of a call. `adopt` takes another function (which takes the module first) to be captured
    from now on. `is_ours` says whether the model's attribute of a name is zgraph's own. `compiled` is what is set as
    the model's `forward`.
    """

    def __init__(
        self,
        module: nn.Module,
        run: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        adopt: Callable[[Callable[..., Any]], None],
        is_ours: Callable[[str], bool],
    ) -> None:
        self.module = module
        self.runs = 0
        self._run, self._adopt, self._is_ours = run, adopt, is_ours
        self._of_class = type(module).forward
        self._wrapper: Any = None  # a function of the user's that calls the compiled forward
        self._take(module.forward)

    def _take(self, original: Any) -> None:
        self.captured = unbound(self.module, original)
        self._copied = is_method(self.module, original)
        self._from_class = self.captured is type(self.module).forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.compiled is not here:
                raise ModelError(
                    "this forward of the model was replaced",
                    where=_place(self.captured),
                    why="a compiled model has one forward, and another one was captured since",
                    hint="call the model itself",
                )
            if self._from_class and type(self.module).forward is not self._of_class:
                self._take_class()
            self.runs += 1
            return self._run(args, kwargs)

        here = self.compiled = autograd_state.untraced(functools.wraps(original)(forward))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, in place of the module's own `_call_impl`."""
        if self.module.__dict__.get("forward") is self.compiled:
            return autograd_state.call_module(self.module, args, kwargs)
        self.settle()
        before = self.runs
        result = autograd_state.call_module(self.module, args, kwargs)
        if self.runs == before:
            raise ModelError(
                "the model ran without its plan",
                where=_place(self._wrapper),
                why="its forward was replaced by a function that can call the compiled one, and did not",
                hint="let it call the forward that it replaces each time, or never: then it is captured instead",
            )
        return result

    def settle(self, staged: bool = False) -> None:
        """Take up a forward that was replaced since. Raises `ModelError` for one that can't be run (with `staged`, any
        wrapper)."""
        given = self.module.__dict__.get("forward")
        if given is self.compiled:
            self._wrapper = None
            if self._from_class and type(self.module).forward is not self._of_class:
                self._take_class()
        elif given is None:  # (deleted from the model, so the class's applies)
            self._capture(types.MethodType(type(self.module).forward, self.module))
        elif given is not self._wrapper:
            if calls(given, self.compiled, self.module, self._is_ours):
                self._wrapper = given
            else:
                self._capture(given)
        if staged and self._wrapper is not None:
            raise ModelError(
                "a function is wrapped around the forward of a model in stages",
                where=_place(self._wrapper),
                why="each rank runs its own part of the captured model, and calls no forward",
                hint="replace the forward before zgraph.compile, by a function that is captured whole",
            )

    def refuse_copy(self) -> None:
        """Raise `ModelError` for a forward that a copy of the model would share with it."""
        self.settle()
        if self._wrapper is not None or not self._copied:
            raise ModelError(
                "a model whose forward was replaced on the instance can't be copied",
                where=_place(self._wrapper or self.captured),
                why="the function holds the model itself: the copy would run the original's weights",
                hint="model.forward = types.MethodType(function, model), or define forward in the model's class",
            )

    def _capture(self, given: Any) -> None:
        if unbound(self.module, given) is not self.captured:
            self._tell(given)
            self._take(given)
        self._wrapper = None
        self.module.__dict__["forward"] = self.compiled

    def _take_class(self) -> None:
        self._of_class = self.captured = type(self.module).forward
        self._tell(self.captured)

    def _tell(self, given: Any) -> None:
        self._adopt(unbound(self.module, given) if given is not self.captured else given)
        logger.warning("the model's forward was replaced by %s: it is captured at the next call", _place(given))


def _place(function: Any) -> str | None:
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)


def calls(function: Any, wanted: Any, module: nn.Module, is_ours: Callable[[str], bool]) -> bool:
    """Return whether a function can call `wanted`.

    That is: it holds `wanted` in its closure, arguments, attributes, or the globals that it names, or the module holds
    it under a name that the user gave. The nearest are looked at first: an object on the way may hold a whole trainer.
    """
    kinds = (types.FunctionType, types.MethodType, functools.partial)
    near = deque([function, *(v for k, v in module.__dict__.items() if isinstance(v, kinds) and not is_ours(k))])
    seen: set[int] = set()
    while near and len(seen) < _SEARCHED:
        item = near.popleft()
        if item is wanted:
            return True
        if id(item) not in seen:
            seen.add(id(item))
            near.extend(_held(item))
    return False


def _held(item: Any) -> Iterator[Any]:
    """Yield what a function, or an object around one, holds."""
    if isinstance(item, types.FunctionType):
        yield from (cell.cell_contents for cell in item.__closure__ or () if _is_set(cell))
        yield from (*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values(), *item.__dict__.values())
        yield from (item.__globals__[name] for name in item.__code__.co_names if name in item.__globals__)
    elif isinstance(item, types.MethodType):
        yield from (item.__func__, item.__self__)
    elif isinstance(item, functools.partial):
        yield from (item.func, *item.args, *item.keywords.values(), *item.__dict__.values())
    elif isinstance(item, (list, tuple, set)):
        yield from item
    elif isinstance(item, dict):
        yield from item.values()
    elif hasattr(item, "__dict__") and not isinstance(item, (nn.Module, torch.Tensor, type, types.ModuleType)):
        yield from vars(item).values()


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True

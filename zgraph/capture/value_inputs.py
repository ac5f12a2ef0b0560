"""Inputs whose values are constants of a capture: small tensors of whole numbers that forward decides by
(`image_grid_thw`).

What forward computes from them alone is known while it is traced: sizes, branches, loops. Their values are part of a
call's signature, so each value has a program of its own. They are declared, or found where a capture fails because
forward decides by values.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from zgraph.capture.learned_sizes import Signature, inputs_by_path
from zgraph.capture.replaced_forward import signature_of
from zgraph.capture.symbolic_capture import SymbolicSizes
from zgraph.errors import SignatureError, SizeError, ZgraphError
from zgraph.names import did_you_mean
from zgraph.plan.shapes import values_in
from zgraph.torch_compat.dynamo import depends_on_values
from zgraph.torch_compat.fake_tensors import MOST_KNOWN

logger = logging.getLogger(__name__)

MAX_ELEMENTS = 64  # the most elements of an input that is tried without being declared
MAX_TRIES = 3  # the most inputs that are tried


def declared_values(
    dynamic: Mapping[str, Any], forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    """Return the inputs of a call whose values a plan declares to be constants.

    Raises `SignatureError` for anything but a small tensor of whole numbers.
    """
    return _values(values_in(dynamic), forward, args, kwargs)


def with_values(sizes: SymbolicSizes | None, constants: Collection[torch.Tensor]) -> SymbolicSizes | None:
    """Return the open sizes of a capture, with these inputs as constants."""
    return replace(sizes or SymbolicSizes({}, {}), values=frozenset(map(id, constants))) if constants else sizes


def _values(
    names: Collection[str], forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    if not names:
        return ()
    leaves = _by_path(forward, args, kwargs)
    taken = []
    for name in sorted(names):
        inner = [path for path in leaves if path.startswith((f"{name}.", f"{name}["))]
        if inner:
            raise _refused(name, "it has inputs inside", f"name one of them: {inner[0]!r}")
        if name not in leaves or leaves[name] is None:  # (a batch without images)
            continue
        tensor = leaves[name]
        if not isinstance(tensor, torch.Tensor):
            raise _refused(
                name, f"it is no tensor, but a {type(tensor).__name__}", "leave it out: its value is a constant anyway"
            )
        if not _whole(tensor) or tensor.numel() > MOST_KNOWN:
            why = f"it has {tensor.numel():,} values of {str(tensor.dtype).removeprefix('torch.')}; whole numbers can, up to {MOST_KNOWN:,} of them"
            raise _refused(name, why, '"value" is for a few numbers by which forward decides (image_grid_thw)')
        taken.append(tensor)
    return tuple(taken)


def _refused(name: str, why: str, hint: str) -> SignatureError:
    return SignatureError(
        f"the values of {name} can't be constants of a program", where=f"dynamic.{name}", why=why, hint=hint
    )


def _whole(x: torch.Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex())


def _by_path(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return inputs_by_path(list(signature_of(forward).parameters)[1:], args, kwargs)


def warn_of_unknown(
    dynamic: Mapping[str, object], forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Warn of inputs that a plan declares and that neither a call nor forward by name has.

    Forward may take any (`**kwargs`), but it may be a slip.
    """
    named = [p.name for p in signature_of(forward).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    known = [*named[1:], *kwargs, *_by_path(forward, args, kwargs)]
    for name in dynamic:
        if name not in known:
            logger.warning(
                "dynamic declares %r, which is no argument of this call; %s", name, did_you_mean(name, known)
            )


def _structure(call: Signature) -> str:
    """Return the part of a signature that calls have in common whichever of their inputs are constants."""
    return call.form.removeprefix(call.inputs)


class ValueInputs:
    """The inputs of one compiled module whose values are constants: declared by its plan, or found."""

    def __init__(self, dynamic: Mapping[str, Any], forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.names: frozenset[str] = values_in(dynamic)
        self._tries: list[frozenset[str]] | None = None  # the sets of inputs to try next; None: no try is under way
        self._known = self.names  # the names without those being tried
        self.of_sizes = (
            False  # whether they are tried because their values decide sizes, which constants would not help
        )
        self._in_vain: set[str] = set()  # the families of calls for which no try has helped

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        """Return the inputs of a call whose values are constants. Raises as `declared_values` does."""
        return _values(self.names, self.forward, args, kwargs)

    def may_help(self, error: Exception, call: Signature) -> bool:
        """Return whether a capture that failed may succeed with one more input as a constant."""
        if isinstance(error, SizeError):
            if self._tries is not None or not error.of_values:
                return self.of_sizes and error.of_values
            known = self.names | set(self._candidates(call))
            return _structure(call) not in self._in_vain and bool(error.inputs) and known.issuperset(error.inputs)
        if not depends_on_values(error):
            return False
        return self._tries is not None or bool(_structure(call) not in self._in_vain and self._candidates(call))

    def next_try(self, error: ZgraphError, call: Signature) -> bool:
        """Set the `names` to try next after the capture for a call has failed; return whether there is anything to try.

        Where no try has helped, the last one has the names as they were before.
        """
        if self._tries is None:
            if not self.may_help(error, call):
                return False
            self.of_sizes = isinstance(error, SizeError)
            candidates = list(error.inputs) if isinstance(error, SizeError) else self._candidates(call)
            self._known = self.names
            self._tries = [] if self.of_sizes else [frozenset([name]) for name in candidates]
            if self.of_sizes or len(candidates) > 1:
                self._tries.append(frozenset(candidates))
        if self._tries:
            more = self._tries.pop(0)
            logger.info("%s; once more with the values of %s as constants", error, ", ".join(sorted(more)))
            self.names = self._known | more
        else:
            self.names, self._tries, self.of_sizes = self._known, None, False
            self._in_vain.add(_structure(call))
        return True

    def _candidates(self, call: Signature) -> list[str]:
        leaves = _by_path(self.forward, *call.call)
        few = {
            path: x.numel()
            for path, x in leaves.items()
            if isinstance(x, torch.Tensor) and _whole(x) and 0 < x.numel() <= MAX_ELEMENTS and path not in self.names
        }
        return sorted((path for path in few if leaves[path].dtype is not torch.bool), key=few.__getitem__)[:MAX_TRIES]

    def settled(self) -> list[str]:
        """Note that a capture is made, and return which inputs were found to be constants."""
        constants = sorted(self.names - self._known) if self._tries is not None else []
        self._tries, self._known, self.of_sizes = None, self.names, False
        return constants

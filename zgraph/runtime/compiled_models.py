"""Keeps track of the compiled models of this process that are alive."""

from __future__ import annotations

import gc
import weakref

from torch import nn

from zgraph.torch_compat.dtensors import local_of

_compiled: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()  # by id
_WORTH_COLLECTING = 2**20  # bytes of weights for which a run of Python's garbage collector pays (0.2 s)


class Compiled:
    """The base of the object that a compiled module has in its `__dict__` as "zgraph"."""


def remember(module: nn.Module) -> None:
    """Register a module as compiled, for as long as it lives."""
    _compiled[id(module)] = module


def is_compiled(module: nn.Module) -> bool:
    """Return whether exactly this module was compiled (not one that contains it, or that it contains)."""
    return isinstance(getattr(module, "__dict__", {}).get("zgraph"), Compiled)


def owner_of(param: nn.Parameter) -> nn.Module | None:
    """Return the compiled model that has exactly this parameter; None if there is none."""
    return next(
        (m for m in list(_compiled.values()) if is_compiled(m) and any(p is param for p in m.parameters())), None
    )


def free_dropped_models() -> None:
    """Free compiled models that nobody refers to any more, if they hold memory that the next one could use.

    A compiled model and its run time refer to each other, so only Python's collector frees them: left to itself it
    may run long after the next model has been compiled, and the two would be held at once.
    """
    live_bytes = sum(p.nbytes for m in list(_compiled.values()) for p in map(local_of, m.parameters()) if not p.is_meta)
    if live_bytes >= _WORTH_COLLECTING:
        gc.collect()

"""Counts the bytes that torch's CPU allocator holds, now and at most, as CUDA's allocator does by itself.

Call `count()` before the first tensor that is to be counted. It puts a counter before the allocator, which is compiled
once (g++, half a minute) and costs next to nothing. The size of the process would be too coarse: malloc does not give
back what was freed.
"""

from __future__ import annotations

import subprocess
from types import ModuleType

from zgraph.errors import UnsupportedError
from zgraph.runtime import native

_module: ModuleType | None = None


def count() -> None:
    """Start counting this process's CPU allocations. Raises `UnsupportedError` without a C++ compiler."""
    global _module
    if _module is not None:
        return
    try:
        module = native.load(native.HERE / "allocations.cpp")
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise UnsupportedError(
            "allocations can't be counted",
            why=f"the counter can't be compiled: {error}",
            hint="install g++, or name a C++ compiler in the environment variable CXX",
        ) from error
    module.install()
    _module = module


def counting() -> bool:
    return _module is not None


def live() -> int:
    """Return the bytes in use now, of those allocated since `count`."""
    return int(_counter().live())


def peak() -> int:
    """Return the most bytes in use at once since `reset_peak`, or since `count`."""
    return int(_counter().peak())


def reset_peak() -> None:
    _counter().reset_peak()


def _counter() -> ModuleType:
    if _module is None:
        raise RuntimeError(
            "allocations are not counted: call zgraph.runtime.allocations.count() before the model is made"
        )
    return _module

"""C++ functions of zgraph's own, compiled with the flags and into the cache folder of Inductor's kernels."""

from __future__ import annotations

import ctypes
import platform

import torch

# (Inductor takes loops as they are written, since it writes vectors itself)
_FLAGS = ("-ftree-loop-vectorize",)


def load(source: str) -> ctypes.CDLL:
    """Compile a C++ source, which needs no headers of torch, and return the library; processes wait for each other, and
    the next ones load it.

    Products and sums are not contracted. Raises what torch raises where no compiler is found (g++, or what CXX names) or
    where it fails.
    """
    from torch._inductor.codecache import CppCodeCache

    # Flags name the processor that compiles as "native"; machines of several kinds may share a cache folder.
    processor = f"// {platform.machine()} {torch.backends.cpu.get_cpu_capability()}\n"
    return CppCodeCache.load(processor + source, extra_flags=_FLAGS)  # type: ignore[no-any-return]

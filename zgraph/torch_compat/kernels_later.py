"""What generated code imports in place of Inductor's own, so that its C++ kernels are compiled after it is loaded."""

from __future__ import annotations

from typing import Any

from torch._inductor import async_compile

from zgraph.torch_compat.kernel_files import KernelSource


class AsyncCompile(async_compile.AsyncCompile):
    """What generated code calls to compile its kernels; C++ kernels are `KernelSource`s, for `compile_kernels`."""

    def cpp_pybinding(self, argtypes: list[str], source_code: str) -> Any:
        """Return a C++ kernel that is not compiled."""
        return KernelSource(argtypes, source_code)

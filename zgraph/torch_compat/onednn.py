"""oneDNN's product of float32 matrices."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch


def onednn_product() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None] | None:
    """Return product(a, b, into, beta), which sets into = beta * into + a @ b by torch's oneDNN, for float32 matrices
    on the CPU.

    Return None where this torch has none, or where a call would end the process: it requires for all dtypes what
    bfloat16 needs (AVX-512, say), and what it raises otherwise can't be caught here. (Torch itself calls it for other
    dtypes only.)
    """
    if not torch.backends.mkldnn.is_available() or torch.__version__ < "2.13":
        return None
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    try:
        function = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))[
            "_ZN2at6native13mkldnn_matmulERKNS_6TensorES3_S3_ff"
        ]
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = [ctypes.POINTER(ctypes.c_void_p)] * 3 + [ctypes.c_float] * 2, None

    def product(a: torch.Tensor, b: torch.Tensor, into: torch.Tensor, beta: float) -> None:
        # (a C++ Tensor is a pointer to the object at address `_cdata`)
        function(*(ctypes.c_void_p(x._cdata) for x in (a, b, into)), beta, 1.0)

    return product

"""Numbers in few bits on CPUs, by `quantized_blocks.cpp`: quantize, dequantize, and dequantize, add up and divide, each in
one pass over memory.

They give the bits that the operators of `zgraph.program.block_quantization` give. On one thread of an Intel Xeon with
AVX-512 they take 0.2 to 0.6 ns an element, where torch's operators take 3 to 17.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zgraph.program.block_quantization import LARGEST, blocks_are_apart, bytes_of
from zgraph.torch_compat import cpp_library

logger = logging.getLogger(__name__)

_FORMATS = {"int8": 0, "int4": 1, "fp8": 2, "bf16": 3}  # as the C++ source numbers them
_LONG, _UINT, _INT, _POINTER = ctypes.c_int64, ctypes.c_uint32, ctypes.c_int, ctypes.c_void_p


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the compiled functions, or None, with a warning, where they can't be compiled."""
    try:
        library = cpp_library.load(Path(__file__).with_name("quantized_blocks.cpp").read_text())
    except Exception as error:  # (no compiler, one that fails, a folder that nothing may be run from)
        logger.warning(
            "torch's operators quantize what is sent in few bits, in the same bits and about ten times the time: "
            "the C++ kernels can't be compiled (%s: %s)",
            type(error).__name__,
            str(error).splitlines()[0] if str(error) else "",
        )
        return None
    shape = (_POINTER, _POINTER, _LONG, _LONG, _LONG, _INT)
    library.zgraph_quantize.argtypes = (*shape, _INT, _UINT, _INT)
    library.zgraph_dequantize.argtypes = library.zgraph_mean.argtypes = (*shape, _INT)
    for function in (library.zgraph_quantize, library.zgraph_dequantize, library.zgraph_mean):
        function.restype = None
    return library


def quantizes(format: str, block: int, *, drawn: bool = False) -> bool:
    """Return whether `quantize` serves a format: one with scales, in blocks that share no byte; drawn, one of whole
    numbers."""
    return (
        format in LARGEST
        and not (drawn and format == "fp8")
        and blocks_are_apart(format, block)
        and _library() is not None
    )


def dequantizes(format: str, block: int) -> bool:
    """Return whether `dequantize` and `mean` serve a format."""
    return format in _FORMATS and blocks_are_apart(format, block) and _library() is not None


def quantize(x: Tensor, format: str, block: int, parts: int, key: Tensor | None = None) -> Tensor:
    """Run `zgraph::to_blocks`; with a key elements are drawn."""
    x = x.float().contiguous()
    count = x.numel() // parts
    sent = x.new_empty(parts * bytes_of(count, format, block), dtype=torch.uint8)
    draw = (0, 0) if key is None else (1, int(key) & 0xFFFFFFFF)
    _run("zgraph_quantize", x, sent, (parts, count, block, _FORMATS[format], *draw))
    return sent


def dequantize(sent: Tensor, format: str, block: int, parts: int, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Run `zgraph::from_blocks`."""
    x = sent.new_empty(shape, dtype=torch.float32)
    _run("zgraph_dequantize", sent.contiguous(), x, (parts, math.prod(shape) // parts, block, _FORMATS[format]))
    return x.to(dtype)


def mean(sent: Tensor, format: str, block: int, parts: int, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Run `zgraph::mean_of_blocks`."""
    x = sent.new_empty(shape, dtype=torch.float32)
    _run("zgraph_mean", sent.contiguous(), x, (parts, math.prod(shape), block, _FORMATS[format]))
    return x.to(dtype)


def _run(name: str, source: Tensor, into: Tensor, told: tuple[Any, ...]) -> None:
    getattr(_library(), name)(source.data_ptr(), into.data_ptr(), *told, torch.get_num_threads())

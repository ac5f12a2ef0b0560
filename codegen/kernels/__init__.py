"""Triton kernels for zgraph's own operators on CUDA devices; on other devices these run as torch's operators.

Where Triton is not installed, and for formats that the kernels do not serve (see `served`), CUDA devices run torch's
operators as well.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from zgraph.program import block_quantization

MOST_BLOCK = 16384  # elements that one program of a kernel holds at once
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def served(format: str, block: int, dtype: torch.dtype) -> bool:
    """Return whether the kernels serve a format: one with scales, in blocks that a kernel can hold and that share no
    byte."""
    apart = format != "int4" or block % 2 == 0
    return format in block_quantization.LARGEST and block <= MOST_BLOCK and apart and dtype in DTYPES


def _to_blocks(x: Tensor, format: str, block: int, parts: int) -> Tensor:
    if not _has_triton() or not served(format, block, x.dtype):
        return block_quantization.to_blocks(x, format, block, parts)
    from zgraph.codegen.kernels import quantized_blocks

    return quantized_blocks.quantize(x, format, block, parts)


def _from_blocks(sent: Tensor, format: str, block: int, parts: int, shape: list[int], dtype: torch.dtype) -> Tensor:
    if not _has_triton() or not served(format, block, dtype):
        return block_quantization.from_blocks(sent, format, block, parts, shape, dtype)
    from zgraph.codegen.kernels import quantized_blocks

    return quantized_blocks.dequantize(sent, format, block, parts, shape, dtype)


def _mean_of_blocks(sent: Tensor, format: str, block: int, parts: int, shape: list[int], dtype: torch.dtype) -> Tensor:
    if not _has_triton() or not served(format, block, dtype):
        return block_quantization.mean_of_blocks(sent, format, block, parts, shape, dtype)
    from zgraph.codegen.kernels import quantized_blocks

    return quantized_blocks.mean(sent, format, block, parts, shape, dtype)


library = torch.library.Library("zgraph", "IMPL")
library.impl("to_blocks", _to_blocks, "CUDA")
library.impl("from_blocks", _from_blocks, "CUDA")
library.impl("mean_of_blocks", _mean_of_blocks, "CUDA")

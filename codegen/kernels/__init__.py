"""Kernels for zgraph's own operators: Triton's on CUDA devices, of C++ on CPUs; elsewhere these run as torch's operators.

Where Triton or a C++ compiler is not installed, and for formats that the kernels do not serve (see `served` and
`cpu_blocks`), torch's operators run as well. Sparse attention has no such operators: what its kernels do not serve is
refused.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from zgraph.codegen.kernels import cpu_blocks
from zgraph.errors import UnsupportedError
from zgraph.plan.attention import sparsity_of
from zgraph.program import block_quantization
from zgraph.program.attention_calls import WIDEST, unserved
from zgraph.program.sparse_attention import LAYOUT_AT, SPARSE, SPARSE_BACKWARD, refuse_changed

MOST_BLOCK = 16384  # elements that one program of a kernel holds at once
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def served(format: str, block: int, dtype: torch.dtype) -> bool:
    """Return whether the kernels serve a format: one with scales, in blocks that a kernel can hold and that share no
    byte."""
    apart = block_quantization.blocks_are_apart(format, block)
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


def _to_blocks_on_cpu(x: Tensor, format: str, block: int, parts: int) -> Tensor:
    function = cpu_blocks.quantize if cpu_blocks.quantizes(format, block) else block_quantization.to_blocks
    return function(x, format, block, parts)


def _to_blocks_drawn_on_cpu(
    x: Tensor, draws: Tensor, places: list[Tensor], format: str, block: int, parts: int
) -> Tensor:
    kernel = cpu_blocks.quantizes(format, block, drawn=True)
    function = cpu_blocks.quantize if kernel else block_quantization.to_blocks
    return function(x, format, block, parts, block_quantization.key_of(draws, places))


def _from_blocks_on_cpu(sent: Tensor, format: str, block: int, *told: Any) -> Tensor:
    function = cpu_blocks.dequantize if cpu_blocks.dequantizes(format, block) else block_quantization.from_blocks
    return function(sent, format, block, *told)


def _mean_of_blocks_on_cpu(sent: Tensor, format: str, block: int, *told: Any) -> Tensor:
    function = cpu_blocks.mean if cpu_blocks.dequantizes(format, block) else block_quantization.mean_of_blocks
    return function(sent, format, block, *told)


def refuse_attention(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise `UnsupportedError` for tensors that the kernels of sparse attention do not serve."""
    what = unserved(query, key, value) if _has_triton() else "attention without Triton"
    if what is not None:
        raise UnsupportedError(
            f"sparse {what} on {query.device.type}",
            why=f"the kernels are Triton's, for float32, bfloat16 and float16, heads of at most {WIDEST} numbers, and keys and values of the "
            "queries' length and width, whose number of heads divides that of the queries",
            hint="whole attention: leave this module out of the plan's attention",
        )


def _sparse_attention(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    refuse_attention(query, key, value)
    refuse_changed(sparsity_of(options[LAYOUT_AT[SPARSE] - 3]))
    from zgraph.codegen.kernels import block_sparse_attention

    return block_sparse_attention.forward(query, key, value, *options)


def _sparse_attention_backward(grad_out: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    refuse_attention(*arguments[:3])
    refuse_changed(sparsity_of(arguments[LAYOUT_AT[SPARSE_BACKWARD] - 1]))
    from zgraph.codegen.kernels import block_sparse_attention

    return block_sparse_attention.backward(grad_out, *arguments)


def _refuse_gradient_of_mask(grad_out: Tensor, *_: Any) -> tuple[Tensor, ...]:
    raise UnsupportedError(
        f"sparse attention with a mask that has a gradient on {grad_out.device.type}",
        why="its kernels give none",
        hint="mask.detach(), if it is not learned; else leave this module out of the plan's attention",
    )


library = torch.library.Library("zgraph", "IMPL")
library.impl("to_blocks", _to_blocks, "CUDA")
library.impl("from_blocks", _from_blocks, "CUDA")
library.impl("mean_of_blocks", _mean_of_blocks, "CUDA")
library.impl("to_blocks", _to_blocks_on_cpu, "CPU")
library.impl("to_blocks_drawn", _to_blocks_drawn_on_cpu, "CPU")
library.impl("from_blocks", _from_blocks_on_cpu, "CPU")
library.impl("mean_of_blocks", _mean_of_blocks_on_cpu, "CPU")
library.impl("sparse_attention", _sparse_attention, "CUDA")
library.impl("sparse_attention_backward", _sparse_attention_backward, "CUDA")
library.impl("sparse_attention_backward_with_mask", _refuse_gradient_of_mask, "CUDA")

"""Numbers in few bits by Triton: quantize, dequantize, and dequantize, add up and divide, each in one pass over memory.

They give the bits that the operators of `zgraph.program.block_quantization` give, which say what the bytes mean. A program of a kernel serves one
block of elements (of one part; `mean`: of all parts). Each byte is read once and written once, so that what is moved is what is needed. For n
elements of e bytes, in blocks of b, in p parts, with q bytes of an element in the format (1, or 1/2 of int4):

    kernel      reads                     writes                    torch's operators move, of int8 and float32 (counted by operator)
    quantize    n e                       n q + 4 ceil(n / b)       59 bytes an element: 12 times what is needed
    dequantize  n q + 4 ceil(n / b)       n e                       15: 3 times
    mean        p (n q + 4 ceil(n / b))   n e                       58 with 2 parts, 436 with 16: 10 and 22 times

A scale is written by bytes, since a part's bytes begin anywhere. How fast they run on a GPU was not measured.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zgraph.program.block_quantization import LARGEST, bytes_of

KINDS = {"int8": 0, "int4": 1, "fp8": 2}
# 1.5 * 2^23: added and taken away, it leaves the nearest whole number, the even one of two.
_MAGIC = tl.constexpr(12582912.0)


@triton.jit
def _whole(x, largest: tl.constexpr):
    """Return x rounded to the nearest integer, at most `largest` in absolute value; 0 for NaN."""
    x = tl.where(x == x, x, 0.0)
    return tl.minimum(tl.maximum((x + _MAGIC) - _MAGIC, -largest), largest).to(tl.int32)


@triton.jit
def _fp8_of(x):
    """Return the bits of x rounded to float8_e4m3fn, ties to even; NaN for what is not finite or too large."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 128
    size = bits & 0x7FFFFFFF
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    large = (size - 0x3C000000 + 0x7FFFF + ((size >> 20) & 1)) >> 20
    rounded = tl.where(size < 0x3C800000, small, large)
    return (sign | tl.where(size >= 0x43F00000, 127, rounded)).to(tl.uint8)


@triton.jit
def _of_fp8(byte):
    """Return the number that these bits of float8_e4m3fn stand for."""
    bits = byte.to(tl.int32)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    power = ((tl.where(exponent == 0, 1, exponent) + 117) << 23).to(tl.float32, bitcast=True)  # 2^(exponent - 10)
    size = tl.where(exponent == 0, mantissa, mantissa + 8).to(tl.float32) * power
    size = tl.where((bits & 127) == 127, float("nan"), size)
    return tl.where(bits >= 128, -size, size)


@triton.jit
def _load_scale(at):
    """Load a float32 from four bytes at any alignment."""
    four = tl.arange(0, 4)
    return (
        tl.sum(tl.load(at + four).to(tl.uint32) << (8 * four).to(tl.uint32)).to(tl.uint32).to(tl.float32, bitcast=True)
    )


@triton.jit
def _scaled(x, scale):
    return tl.where(scale == 0, 0.0, tl.div_rn(x, tl.where(scale == 0, 1.0, scale)))


@triton.jit
def _largest_of(x):
    """Return the largest absolute value, or NaN if any element is NaN."""
    largest = tl.max(tl.where(x == x, tl.abs(x), 0.0))
    return tl.where(tl.max((x != x).to(tl.int32)) > 0, float("nan"), largest)


@triton.jit
def quantize_kernel(
    x, sent, count, blocks, size, BLOCK: tl.constexpr, LEN: tl.constexpr, KIND: tl.constexpr, LARGEST: tl.constexpr
):
    part, at = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    x += part * count
    sent += part * size
    if KIND == 1:  # the earlier element of two is the low half of a byte
        pair = tl.arange(0, LEN // 2)
        first = at * BLOCK + 2 * pair
        inside = 2 * pair < BLOCK
        low = tl.load(x + first, mask=inside & (first < count), other=0.0).to(tl.float32)
        high = tl.load(x + first + 1, mask=inside & (first + 1 < count), other=0.0).to(tl.float32)
        largest = _largest_of(
            tl.where(low == low, tl.maximum(tl.abs(low), tl.where(high == high, tl.abs(high), 0.0)), low)
        )
        broken = tl.max((high != high).to(tl.int32)) > 0
        scale = tl.div_rn(tl.where(broken, float("nan"), largest), LARGEST)
        lower, upper = _whole(_scaled(low, scale), LARGEST), _whole(_scaled(high, scale), LARGEST)
        byte = ((lower & 15) | ((upper & 15) << 4)).to(tl.uint8)
        tl.store(sent + 4 * blocks + first // 2, byte, mask=inside & (first < count))
    else:
        each = tl.arange(0, LEN)
        here = at * BLOCK + each
        inside = (each < BLOCK) & (here < count)
        value = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
        scale = tl.div_rn(_largest_of(value), LARGEST)
        if KIND == 0:
            byte = (_whole(_scaled(value, scale), LARGEST) & 255).to(tl.uint8)
        else:
            byte = _fp8_of(_scaled(value, scale))
        tl.store(sent + 4 * blocks + here, byte, mask=inside)
    four = tl.arange(0, 4)
    bits = scale.to(tl.uint32, bitcast=True)
    tl.store(sent + 4 * at + four, ((bits >> (8 * four).to(tl.uint32)) & 255).to(tl.uint8))


@triton.jit
def _back(sent, at, here, inside, blocks, KIND: tl.constexpr):
    """Dequantize the elements `here` of the block `at` to float32."""
    payload = sent + 4 * blocks
    scale = _load_scale(sent + 4 * at)
    if KIND == 1:
        byte = tl.load(payload + here // 2, mask=inside, other=0).to(tl.int32)
        half = (byte >> (4 * (here % 2)).to(tl.int32)) & 15
        return tl.where(half > 7, half - 16, half).to(tl.float32) * scale
    byte = tl.load(payload + here, mask=inside, other=0)
    if KIND == 0:
        return byte.to(tl.int8, bitcast=True).to(tl.float32) * scale
    return _of_fp8(byte) * scale


@triton.jit
def dequantize_kernel(sent, x, count, blocks, size, BLOCK: tl.constexpr, LEN: tl.constexpr, KIND: tl.constexpr):
    part, at = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    each = tl.arange(0, LEN)
    here = at * BLOCK + each
    inside = (each < BLOCK) & (here < count)
    values = _back(sent + part * size, at, here, inside, blocks, KIND)
    tl.store(x + part * count + here, values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def mean_kernel(
    sent, x, count, blocks, size, BLOCK: tl.constexpr, LEN: tl.constexpr, KIND: tl.constexpr, PARTS: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, LEN)
    here = at * BLOCK + each
    inside = (each < BLOCK) & (here < count)
    total = _back(sent, at, here, inside, blocks, KIND)
    for _ in range(1, PARTS):
        sent += size
        total += _back(sent, at, here, inside, blocks, KIND)
    total = tl.div_rn(total, PARTS * 1.0)
    tl.store(x + here, total.to(x.dtype.element_ty), mask=inside)


def _told(format: str, block: int, count: int) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Return the numbers that a kernel is called with, (elements, blocks, bytes) of a part, and the options that it is
    compiled with.

    Products are not fused with sums: a fused product is rounded differently from torch's operators.
    """
    length = max(2, triton.next_power_of_2(block))
    options = {"BLOCK": block, "LEN": length, "KIND": KINDS[format], "enable_fp_fusion": False}
    return (count, math.ceil(count / block), bytes_of(count, format, block)), options


def quantize(x: Tensor, format: str, block: int, parts: int) -> Tensor:
    """Run `zgraph::to_blocks`."""
    sizes, options = _told(format, block, x.numel() // parts)
    sent = x.new_empty(parts * sizes[2], dtype=torch.uint8)
    if x.numel():
        quantize_kernel[sizes[1], parts](x.contiguous(), sent, *sizes, **options, LARGEST=LARGEST[format])
    return sent


def dequantize(sent: Tensor, format: str, block: int, parts: int, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Run `zgraph::from_blocks`."""
    sizes, options = _told(format, block, math.prod(shape) // parts)
    x = sent.new_empty(shape, dtype=dtype)
    if x.numel():
        dequantize_kernel[sizes[1], parts](sent, x, *sizes, **options)
    return x


def mean(sent: Tensor, format: str, block: int, parts: int, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Run `zgraph::mean_of_blocks`."""
    sizes, options = _told(format, block, math.prod(shape))
    x = sent.new_empty(shape, dtype=dtype)
    if x.numel():
        mean_kernel[(sizes[1],)](sent, x, *sizes, **options, PARTS=parts)
    return x

"""Quantization for collectives: operators that turn a tensor into bytes in a small format, and bytes into a tensor.

A tensor is cut into parts (one for each rank that is sent one), a part into blocks of a fixed number of elements, the
last one shorter. The bytes of a part are, in this order: for formats with a scale the scale of each block (float32),
then its elements: one byte (int8; fp8 as float8_e4m3fn), half a byte (int4, the earlier element in the low half), or
two (bf16, fp16). An element is its block's scale times the number that is sent, and the scale is the block's largest
absolute value over the largest number of the format, so that the error of an element is at most half a scale (int8,
int4; block-wise quantization, Dettmers et al. 2022; in collectives, ZeRO++, Wang et al. 2023). An infinite or NaN
element makes its whole block NaN or infinite: what is not finite is never sent as if it were.

An element is rounded to the nearest number of the format, or *drawn* (stochastic rounding): rounded up with the
probability that makes it right on average. A draw's random bits are a hash of a counter that is an input of the
program, of the rank's positions in the mesh, of the element's position in the tensor and of its block's scale: the
same again for the same step, and different on each rank, at each step and in each tensor.

`zgraph::to_blocks(x, format, block, parts) -> bytes` quantizes contiguous tensors whose elements the parts divide, and
`zgraph::from_blocks(bytes, format, block, parts, shape, dtype) -> x` dequantizes them. `zgraph::mean_of_blocks(bytes,
format, block, parts, shape, dtype)` is the mean of the parts, each of which has this shape; it is added up in float32,
in the order of the parts. `zgraph::to_blocks_drawn(x, draws, places, …) -> bytes` draws. `zgraph::to_blocks_fed(x,
residual, draws, places, scale, …) -> bytes` quantizes x + scale * residual, and leaves the quantization error in the
residual (error feedback: Seide et al. 2014, Karimireddy et al. 2019), divided by the scale; where the error is not
finite the residual stays as it was.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from zgraph.program.ops import library

LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
"""The largest number of each format that has scales."""
WIDE = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The formats without scales: elements are rounded to a dtype."""
FORMATS = (*WIDE, "fp8", "int8", "int4")
_BITS = {"bf16": (-126, 7), "fp16": (-14, 10), "fp8": (-6, 3)}  # the least exponent, and the bits behind the point
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-4}
"""The largest relative rounding error of an element."""

_SCALE = 4  # bytes


def bytes_of(elements: int, format: str, block: int) -> int:
    """Return the number of bytes of one quantized part with this number of elements (a symbolic size gives another)."""
    if format in WIDE:
        return 2 * elements
    payload = (elements + 1) // 2 if format == "int4" else elements
    return _SCALE * -(-elements // block) + payload


def blocks_are_apart(format: str, block: int) -> bool:
    """Return whether no byte has elements of two blocks, so that blocks can be worked on at once."""
    return format != "int4" or block % 2 == 0


def to_blocks(x: Tensor, format: str, block: int, parts: int, key: Tensor | None = None) -> Tensor:
    """Quantize `x` to bytes (see the module's docstring): rounded at random by `key` (drawn), or to the nearest
    without one."""
    rows = x.reshape(parts, -1)
    if format in WIDE:
        if key is not None:
            rows = _drawn(rows.float(), format, _shares(rows.shape, key))
        return rows.to(WIDE[format]).contiguous().view(torch.uint8).reshape(-1)
    count = rows.shape[1]
    blocks = _in_blocks(rows.float(), block)
    scales = blocks.abs().amax(-1, keepdim=True) / LARGEST[format]
    sent = torch.where(scales == 0, 0.0, blocks / scales).reshape(parts, -1)[:, :count]
    if key is not None:
        of_blocks = scales.view(torch.int32).expand(blocks.shape).reshape(parts, -1)[:, :count]
        sent = _drawn(sent, format, _shares(sent.shape, key, of_blocks))
    return torch.cat([scales.view(parts, -1).view(torch.uint8), _payload(sent, format)], 1).reshape(-1)


def _mixed(x: Tensor) -> Tensor:
    """Return a hash of each 32-bit integer. Shifts of int32 copy the sign bit in, so the shifted bits are masked."""
    x = x ^ (x >> 16 & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15 & 0x1FFFF)
    x = x * (0x846CA68B - 2**32)
    return x ^ (x >> 16 & 0xFFFF)


def key_of(draws: Tensor, places: list[Tensor]) -> Tensor:
    """Return the key of a rank's draws: a hash of the counter `draws` and of its positions in the mesh."""
    key = _mixed((draws & 0x7FFFFFFF).to(torch.int32) ^ 0x3C6EF372)
    for place in places:
        key = _mixed(key + 0x9E3779B + place.reshape(()).to(torch.int32))
    return key


def _shares(shape: torch.Size, key: Tensor, of_blocks: Tensor | None = None) -> Tensor:
    """Return a pseudo-random number in [0, 1) for each element: a hash of its position, of the key and of its block's
    scale."""
    at = _mixed(torch.arange(shape.numel(), dtype=torch.int32, device=key.device).view(shape)) ^ key
    bits = _mixed(at if of_blocks is None else at ^ of_blocks)
    return (bits >> 8 & 0xFFFFFF).float() * 2.0**-24


def _drawn(values: Tensor, format: str, shares: Tensor) -> Tensor:
    """Round each value at random to one of the two neighbouring numbers of the format: up where `shares` is below the
    remainder."""
    if format not in _BITS:
        whole = values.floor()
        return whole + (shares < values - whole)
    lowest, mantissa = _BITS[format]
    step = torch.frexp(values)[1].sub(1).clamp(min=lowest).sub(mantissa)
    scaled = torch.ldexp(values.double(), -step)
    whole = scaled.floor()
    return torch.ldexp(whole + (shares < scaled - whole), step).float()


def _in_blocks(rows: Tensor, block: int) -> Tensor:
    """Reshape [parts, elements] to [parts, blocks, elements of a block], padded with zeros."""
    missing = -rows.shape[1] % block
    return torch.nn.functional.pad(rows, (0, missing)).view(rows.shape[0], -1, block)


def _payload(sent: Tensor, format: str) -> Tensor:
    if format == "fp8":
        return sent.to(torch.float8_e4m3fn).view(torch.uint8)
    whole = sent.nan_to_num(0.0).round().clamp(-LARGEST[format], LARGEST[format]).to(torch.int8)
    if format == "int8":
        return whole.view(torch.uint8)
    pairs = torch.nn.functional.pad(whole, (0, whole.shape[1] % 2)).view(whole.shape[0], -1, 2).view(torch.uint8)
    return (pairs[..., 0] & 15) | (pairs[..., 1] << 4)


def _parts(sent: Tensor, format: str, block: int, parts: int, count: int) -> Tensor:
    """Dequantize bytes to [parts, elements] in float32."""
    rows = sent.view(parts, -1)
    if format in WIDE:
        return rows.view(WIDE[format]).float()
    here = _SCALE * math.ceil(count / block)
    scales = rows[:, :here].clone(memory_format=torch.contiguous_format).view(torch.float32)
    elements = _elements(rows[:, here:], format)[:, :count]
    return (_in_blocks(elements, block) * scales.unsqueeze(-1)).view(parts, -1)[:, :count]


def _elements(payload: Tensor, format: str) -> Tensor:
    if format == "fp8":
        return payload.contiguous().view(torch.float8_e4m3fn).float()
    if format == "int8":
        return payload.contiguous().view(torch.int8).float()
    halves = torch.stack([payload & 15, payload >> 4], -1).flatten(1).to(torch.int8)
    return torch.where(halves > 7, halves - 16, halves).float()


def _to_blocks_drawn(x: Tensor, draws: Tensor, places: list[Tensor], format: str, block: int, parts: int) -> Tensor:
    return to_blocks(x, format, block, parts, key_of(draws, places))


def _to_blocks_fed(
    x: Tensor,
    residual: Tensor,
    draws: Tensor | None,
    places: list[Tensor],
    scale: Tensor | None,
    format: str,
    block: int,
    parts: int,
) -> Tensor:
    carried = residual if scale is None else residual * scale
    whole = x.reshape(-1).float() + carried
    told = (format, block, parts)
    sent = TO_BLOCKS(whole, *told) if draws is None else TO_BLOCKS_DRAWN(whole, draws, places, *told)
    left = whole - FROM_BLOCKS(sent, *told, list(whole.shape), torch.float32)
    left = left if scale is None else left / scale
    residual.copy_(torch.where(left.isfinite(), left, residual))
    return sent


def from_blocks(sent: Tensor, format: str, block: int, parts: int, shape: list[int], dtype: torch.dtype) -> Tensor:
    return _parts(sent, format, block, parts, math.prod(shape) // parts).reshape(shape).to(dtype).contiguous()


def mean_of_blocks(sent: Tensor, format: str, block: int, parts: int, shape: list[int], dtype: torch.dtype) -> Tensor:
    first, *others = _parts(sent, format, block, parts, math.prod(shape)).unbind(0)
    total = first.clone()
    for part in others:
        total += part
    return (total / parts).view(shape).to(dtype)


def _like_bytes(x: Tensor, format: str, block: int, parts: int) -> Tensor:
    return x.new_empty(parts * bytes_of(x.numel() // parts, format, block), dtype=torch.uint8)


def _like_bytes_drawn(x: Tensor, draws: Tensor, places: list[Tensor], *told: Any) -> Tensor:
    return _like_bytes(x, *told)


def _like_bytes_fed(x: Tensor, residual: Tensor, draws: Any, places: list[Tensor], scale: Any, *told: Any) -> Tensor:
    return _like_bytes(x, *told)


def _like_tensor(sent: Tensor, format: str, block: int, parts: int, shape: list[int], dtype: Any) -> Tensor:
    return sent.new_empty(shape, dtype=dtype)


_WHAT = "str format, int block, int parts"
library.define(f"to_blocks(Tensor x, {_WHAT}) -> Tensor")
library.define(f"to_blocks_drawn(Tensor x, Tensor draws, Tensor[] places, {_WHAT}) -> Tensor")
library.define(
    f"to_blocks_fed(Tensor x, Tensor(a!) residual, Tensor? draws, Tensor[] places, Tensor? scale, {_WHAT}) -> Tensor"
)
library.define(f"from_blocks(Tensor sent, {_WHAT}, SymInt[] shape, ScalarType dtype) -> Tensor")
library.define(f"mean_of_blocks(Tensor sent, {_WHAT}, SymInt[] shape, ScalarType dtype) -> Tensor")
library.impl("to_blocks", to_blocks, "CompositeExplicitAutograd")
library.impl("to_blocks_drawn", _to_blocks_drawn, "CompositeExplicitAutograd")
library.impl("to_blocks_fed", _to_blocks_fed, "CompositeExplicitAutograd")
library.impl("from_blocks", from_blocks, "CompositeExplicitAutograd")
library.impl("mean_of_blocks", mean_of_blocks, "CompositeExplicitAutograd")
torch.library.register_fake("zgraph::to_blocks", _like_bytes, lib=library)
torch.library.register_fake("zgraph::to_blocks_drawn", _like_bytes_drawn, lib=library)
torch.library.register_fake("zgraph::to_blocks_fed", _like_bytes_fed, lib=library)
torch.library.register_fake("zgraph::from_blocks", _like_tensor, lib=library)
torch.library.register_fake("zgraph::mean_of_blocks", _like_tensor, lib=library)

TO_BLOCKS = torch.ops.zgraph.to_blocks.default
TO_BLOCKS_DRAWN = torch.ops.zgraph.to_blocks_drawn.default
TO_BLOCKS_FED = torch.ops.zgraph.to_blocks_fed.default
SENDERS = (TO_BLOCKS, TO_BLOCKS_DRAWN, TO_BLOCKS_FED)
"""The operators that quantize their first argument; their last three arguments are the format, the block and the parts."""
FROM_BLOCKS = torch.ops.zgraph.from_blocks.default
MEAN_OF_BLOCKS = torch.ops.zgraph.mean_of_blocks.default


def is_drawn(sender: fx.Node) -> bool:
    """Return whether this node rounds at random instead of to the nearest."""
    return sender.target is TO_BLOCKS_DRAWN or (sender.target is TO_BLOCKS_FED and sender.args[2] is not None)


def most_wrong(x: Tensor, format: str, block: int, parts: int, drawn: bool = False) -> Tensor:
    """Return the largest error that quantization may leave in each element, in the shape of `x`.

    It is the bound that the format gives, twice that where elements are drawn.
    """
    return _most_wrong(x, format, block, parts) * (2 if drawn else 1)


def most_wrong_part(format: str, block: int, drawn: bool = False) -> float:
    """Return the largest error that quantization may leave in an element, as a part of the largest element of its
    block."""
    return float(most_wrong(torch.ones(block), format, block, 1, drawn).max())


def _most_wrong(x: Tensor, format: str, block: int, parts: int) -> Tensor:
    values = x.reshape(parts, -1).double().abs()
    if format in WIDE:
        bound = values * ROUNDING[format] + torch.finfo(WIDE[format]).smallest_normal * ROUNDING[format]
        return bound.view(x.shape)
    scales = _in_blocks(values, block).amax(-1, keepdim=True) / LARGEST[format]
    share = values * ROUNDING["fp8"] if format == "fp8" else torch.zeros_like(values)
    # (fp8: half a step of the smallest numbers, 2^-9; the others: half a step. The scale, its inverse and the product are rounded, too.)
    step = scales * (2.0**-10 if format == "fp8" else 0.5) + scales * LARGEST[format] * 2.0**-22
    wide = step.expand(-1, -1, block).reshape(parts, -1)[:, : values.shape[1]]
    return (share + wide + 2.0**-120).view(x.shape)

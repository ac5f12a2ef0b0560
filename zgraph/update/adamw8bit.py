"""8-bit optimizer states for any rule: Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization".

A block's elements are divided by its largest magnitude and rounded to the nearest of 256 values, which are densest
near zero (the paper's dynamic tree quantization, with the values of bitsandbytes). Blocks are within rows of dimension
0, so sharding never cuts one, and the numbers do not depend on the world size. Where ranks divide the rows (tensor
parallelism) blocks are those of the whole rows: a rank has some of them, or, where its part begins or ends within a
block, all ranks have the scales of all blocks. The rule itself sees float32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from zgraph.update.rule_interface import Part, Rule, State

SIGNED = ("exp_avg",)
DECADES = 7


def blockwise(rule: Rule) -> Rule:
    """Return a rule that does what `rule` does and keeps its states as 8-bit codes between updates.

    A state "x" becomes the codes "x" (uint8, of the parameter's shape) and "x_scale" (float32, [rows, blocks]: the
    largest magnitude of each block). Parameters of fewer than two dimensions, and those with fewer than `min_row_size`
    elements in a row, keep float32 states, as the paper does for small tensors: whether a parameter is small must not
    depend on how many of its rows this rank has. The record has `block_size` and `min_row_size`.
    """

    def states(record: Any, shape: tuple[int, ...], dtype: torch.dtype, whole: tuple[int, ...]) -> dict[str, State]:
        wide = rule.states(record, shape, dtype, whole)
        row = math.prod(whole[1:])
        if len(shape) < 2 or row < record.min_row_size:
            return wide
        cut = _cuts_blocks(shape, whole, record.block_size)
        width = row if cut else math.prod(shape[1:])
        states_by_name: dict[str, State] = {}
        for name in wide:
            states_by_name[name] = State(shape, torch.uint8, dynamic_map(name in SIGNED).index(0.0))
            states_by_name[_scale(name)] = State((shape[0], _blocks_in(width, record.block_size)), of_rows=cut)
        return states_by_name

    def update(
        record: Any, p: Tensor, g: Tensor, old: Mapping[str, Tensor], s: Mapping[str, Tensor], step: Tensor, part: Part
    ) -> tuple[Tensor, dict[str, Tensor]]:
        coded = [name for name in old if _scale(name) in old]
        if not coded:
            return rule.update(record, p, g, old, s, step, part)
        block = record.block_size
        cut = _cuts_blocks(tuple(p.shape), part.shape, block)
        places = part.within_rows(tuple(p.shape)) if cut else None
        blocks = None if places is None else places // block

        def widened(name: str) -> Tensor:
            codes, scales, signed = old[name], old[_scale(name)], name in SIGNED
            if blocks is None:
                return dequantize(codes, scales, signed, block)
            values = _values(signed, codes.device)[codes.flatten(1).to(torch.int64)]
            return (values * scales.index_select(1, blocks)).reshape(codes.shape)

        def narrowed(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
            if blocks is None:
                return quantize(x, name in SIGNED, block)
            flat = x.flatten(1)
            none = flat.new_zeros(old[_scale(name)].shape)
            scales = none.scatter_reduce(1, blocks.expand(flat.shape), flat.abs(), "amax")
            scales = part.largest_in_rows(scales)
            return _codes(flat, scales.index_select(1, blocks), name in SIGNED).reshape(x.shape), scales

        wide = {name: widened(name).to(p.dtype) for name in coded}
        new, changed = rule.update(record, p, g, wide, s, step, part)
        results: dict[str, Tensor] = {}
        for name in coded:
            results[name], results[_scale(name)] = narrowed(name, changed[name].to(torch.float32))
        return new, results

    return Rule(rule.scalars, states, update)


@cache
def dynamic_map(signed: bool) -> tuple[float, ...]:
    """Return the 256 values, ascending, in (-1, 1] or [0, 1]: each decade from 1e-7 up has twice as many as the one
    below."""
    values = [0.0, 1.0]
    for i in range(DECADES):
        count = 2 ** (i if signed else i + 1)
        edges = [0.1 + 0.9 * k / count for k in range(count + 1)]
        scale = 10.0 ** (i - DECADES + 1)
        middles = [scale * (low + high) / 2 for low, high in itertools.pairwise(edges)]
        values += middles
        if signed:
            values += [-m for m in middles]
    return tuple(sorted(values))


def quantize(x: Tensor, signed: bool, block: int) -> tuple[Tensor, Tensor]:
    """Quantize x [rows, …]; return (codes: uint8 of x's shape, scales: float32 [rows, blocks])."""
    blocks = _blocks(x, block)
    scales = blocks.abs().amax(-1)
    return _unblocked(_codes(blocks, scales.unsqueeze(-1), signed), x), scales


def _codes(x: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Return the codes of numbers; `scales` has the scale of each number's block."""
    values = _values(signed, x.device)
    middles = (values[1:] + values[:-1]) / 2
    # A block of zeros has no magnitude to divide by, and must become zeros.
    unit = x / scales.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.bucketize(unit, middles).to(torch.uint8)


def dequantize(codes: Tensor, scales: Tensor, signed: bool, block: int) -> Tensor:
    """Return the float32 values of codes, in their shape."""
    values = _values(signed, codes.device)[_blocks(codes, block).to(torch.int64)]
    return _unblocked(values * scales.unsqueeze(-1), codes)


def _values(signed: bool, device: torch.device) -> Tensor:
    return torch.tensor(dynamic_map(signed), dtype=torch.float32, device=device)


def _scale(name: str) -> str:
    return f"{name}_scale"


def _cuts_blocks(shape: tuple[int, ...], whole: tuple[int, ...], block: int) -> bool:
    """Return whether a rank's part of this shape has parts of blocks. Fewer rows alone cut none."""
    if shape[1:] == whole[1:]:
        return False
    return shape[2:] != whole[2:] or math.prod(shape[1:]) % block != 0


def _blocks_in(width: int, block: int) -> int:
    return -(-width // block)


def _blocks(x: Tensor, block: int) -> Tensor:
    """Reshape [rows, …] to [rows, blocks, block], the last block of each row padded with zeros."""
    flat = x.flatten(1)
    width = flat.shape[1]
    missing = -width % block
    padded = torch.constant_pad_nd(flat, [0, missing]) if missing else flat
    return padded.reshape(x.shape[0], _blocks_in(width, block), block)


def _unblocked(blocks: Tensor, like: Tensor) -> Tensor:
    return blocks.flatten(1)[:, : math.prod(like.shape[1:])].reshape(like.shape)

"""AdamW with states of 8 bits: Dettmers et al., 2021, "8-bit Optimizers via Block-wise Quantization".

A block's elements are divided by its largest magnitude and rounded to the nearest of 256 values which lie densest near
zero (the paper's dynamic tree quantization). Blocks lie within rows, so sharding on dimension 0 never cuts one, and the
numbers do not depend on the world size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from zgraph.update.rule import Part, Rule, State

CODES = {"exp_avg": True, "exp_avg_sq": False}  # whether it has a sign


@cache
def dynamic_map(signed: bool) -> tuple[float, ...]:
    """The 256 values, ascending, in [-1, 1] or [0, 1]: for each decade down to 1e-7 twice as many as for the next."""
    values = [0.0, 1.0]
    decades = 7
    for i in range(decades):
        count = 2 ** (i if signed else i + 1)
        edges = [0.1 + 0.9 * k / count for k in range(count + 1)]
        middles = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
        scale = 10.0 ** (i - decades + 1)
        values += [scale * m for m in middles]
        if signed:
            values += [-scale * m for m in middles]
    return tuple(sorted(values + [0.0] * (256 - len(values))))


def quantize(x: Tensor, signed: bool, block: int) -> tuple[Tensor, Tensor]:
    """(codes: uint8 of x's shape, scales: float32 [rows, blocks]) of x [rows, …]."""
    blocks = _blocks(x, block)
    scales = blocks.abs().amax(-1)
    values = torch.tensor(dynamic_map(signed), dtype=torch.float32, device=x.device)
    middles = (values[1:] + values[:-1]) / 2
    unit = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    codes = torch.bucketize(unit, middles).to(torch.uint8)
    return _unblocked(codes, x), scales


def dequantize(codes: Tensor, scales: Tensor, signed: bool, block: int) -> Tensor:
    """The float32 tensor that `quantize` gave codes and scales of, rounded."""
    values = torch.tensor(dynamic_map(signed), dtype=torch.float32, device=codes.device)
    blocks = values[_blocks(codes, block).to(torch.int64)] * scales.unsqueeze(-1)
    return _unblocked(blocks, codes)


def _blocks(x: Tensor, block: int) -> Tensor:
    flat = x.reshape(x.shape[0], -1)
    missing = -flat.shape[1] % block
    padded = torch.constant_pad_nd(flat, [0, missing]) if missing else flat
    return padded.reshape(x.shape[0], -1, block)


def _unblocked(blocks: Tensor, like: Tensor) -> Tensor:
    width = math.prod(like.shape[1:])
    return blocks.reshape(like.shape[0], -1)[:, :width].reshape(like.shape)


def _small(record: Any, shape: tuple[int, ...]) -> bool:
    return len(shape) < 2 or math.prod(shape[1:]) < record.min_row_size


def _states(record: Any, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, State]:
    if _small(record, shape):
        return {name: State(shape, dtype) for name in CODES}
    scales = (shape[0], -(-math.prod(shape[1:]) // record.block_size))
    found: dict[str, State] = {}
    for name, signed in CODES.items():
        zero = dynamic_map(signed).index(0.0)
        found[name] = State(shape, torch.uint8, zero)
        found[f"{name}_scale"] = State(scales, torch.float32)
    return found


def _update(
    record: Any, p: Tensor, g: Tensor, old: Mapping[str, Tensor], s: Mapping[str, Tensor], step: Tensor, part: Part
) -> tuple[Tensor, dict[str, Tensor]]:
    small = f"{next(iter(CODES))}_scale" not in old
    wide = {
        name: old[name] if small else dequantize(old[name], old[f"{name}_scale"], signed, record.block_size)
        for name, signed in CODES.items()
    }
    first = torch.lerp(wide["exp_avg"], g, (1 - s["betas.0"]).to(g.dtype))
    second = torch.addcmul(wide["exp_avg_sq"] * s["betas.1"].to(g.dtype), (1 - s["betas.1"]).to(g.dtype) * g, g)
    if record.weight_decay:
        p = p * (1 - s["lr"] * s["weight_decay"]).to(p.dtype)
    one, two = 1 - s["betas.0"] ** step, 1 - s["betas.1"] ** step
    denominator = second.sqrt() / (two**0.5).to(g.dtype) + s["eps"].to(g.dtype)
    new = torch.addcdiv(p, (-(s["lr"] / one)).to(p.dtype) * first, denominator)
    results: dict[str, Tensor] = {}
    for name, value in (("exp_avg", first), ("exp_avg_sq", second)):
        if small:
            results[name] = value
        else:
            results[name], results[f"{name}_scale"] = quantize(value, CODES[name], record.block_size)
    return new, results


ADAMW_8BIT = Rule(("lr", "betas.0", "betas.1", "eps", "weight_decay"), _states, _update)

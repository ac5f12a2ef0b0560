"""A momentum in one bit for each element: signs, and a scale for each rank (1-bit Adam, Tang et al., 2021).

    each rank: momentum + its residual -> signs and a scale, a part for each rank -> all_to_all
    each part: the mean of the received parts + that rank's residual -> signs and a scale -> all_gather

A residual is what a rank has not sent yet. What a rank sends another of one parameter is a row of bytes: eight signs
in each, and the scale's four. Padding, the scale (the norm over the root of the number of elements, padding included)
and the sign of zero, which is positive, are DeepSpeed's (0.19.6).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

WORKER, SERVER = "worker_error", "server_error"  # what a rank has not sent of its momentum, and of its part of the mean
SCALE_BYTES = 4


def padded(elements: int, ranks: int) -> int:
    """Return the number of elements as which a parameter is sent: a multiple of the ranks whose parts are whole bytes."""
    unit = ranks * (ranks * 8 // math.gcd(ranks, 8))
    return max(1, -(-elements // unit)) * unit


def bytes_of(elements: int, ranks: int) -> int:
    """Return the bytes that a rank sends each other rank of a parameter, in each of the two exchanges."""
    return padded(elements, ranks) // ranks // 8 + SCALE_BYTES


def residual_sizes(elements: int, ranks: int) -> dict[str, int]:
    """Return the elements of each residual that a rank keeps for a parameter."""
    whole = padded(elements, ranks)
    return {WORKER: whole, SERVER: whole // ranks} if ranks > 1 else {}


def sent(x: Tensor, error: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Compress a tensor, with the residual `error` added, to rows of bytes, one for each part; return them and the new
    residual."""
    flat = torch.constant_pad_nd(x.flatten().to(torch.float32), [0, error.shape[0] - x.numel()]) + error
    scale = torch.linalg.vector_norm(flat) / math.sqrt(flat.numel())
    positive = flat >= 0
    left = flat - torch.where(positive, scale, -scale)
    places = torch.arange(8, device=x.device)
    signs = (positive.reshape(parts, -1, 8).to(torch.int64) << places).sum(-1).to(torch.uint8)
    number = scale.reshape(1).view(torch.int32).to(torch.int64)
    scales = ((number >> (8 * torch.arange(SCALE_BYTES, device=x.device))) & 255).to(torch.uint8)
    return torch.cat([signs, scales.expand(parts, SCALE_BYTES)], 1), left


def read(rows: Tensor) -> Tensor:
    """Return the float32 elements that rows of bytes stand for, a row of each."""
    signs, scales = rows[:, :-SCALE_BYTES], rows[:, -SCALE_BYTES:].to(torch.int64)
    number = (scales << (8 * torch.arange(SCALE_BYTES, device=rows.device))).sum(-1)
    number = torch.where(number >= 2**31, number - 2**32, number)
    scale = number.to(torch.int32).view(torch.float32).reshape(-1, 1)
    places = torch.arange(8, device=rows.device)
    positive = ((signs.to(torch.int64).unsqueeze(-1) >> places) & 1).reshape(rows.shape[0], -1) > 0
    return torch.where(positive, scale, -scale)


def mean_of(rows: Tensor) -> Tensor:
    """Return the mean of the ranks' parts, 1-dim, from their rows of bytes."""
    return read(rows).sum(0) / rows.shape[0]

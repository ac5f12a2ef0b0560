"""Which weights of sparse attention are dropped: a function of a seed and of each weight's place, so that no mask is stored.

The random numbers are those of Philox4x32-10 (Salmon et al. 2011), the generator of torch's CUDA kernels and of Triton. Its key is the seed's
low 32 bits, then its high ones; its counter is (key // 4, query, head, row), and word key % 4 of its four is that weight's. A weight is dropped
if its word is less than `threshold(rate)`, and multiplied by `factor(rate)` if it is left. Positions are those of the whole sequence, heads
those of all ranks, and rows those of the tensor that attention gets: whoever computes a part of the blocks, or of the heads, has the same mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SEEDS = (0, (1 << 63) - 1)
"""The least seed, and the one above the largest, as `torch.randint` takes them: a seed is drawn from the generator of the attention's device."""

_LOW = 0xFFFFFFFF
_FACTORS, _STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def threshold(rate: float) -> int:
    """Return the least word of a weight that is left, of 32 bits."""
    return min(round(rate * (1 << 32)), _LOW)


def factor(rate: float) -> float:
    """Return what weights that are left are multiplied by; 0 where none is to be left."""
    return 1 / (1 - rate) if rate < 1 else 0.0


def words(counters: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Return the four words of Philox4x32-10, int64 below 2^32, for the four words of counters, which broadcast."""
    first, second, third, fourth = counters
    one, other = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(_ROUNDS):
        low, high = first * _FACTORS[0], third * _FACTORS[1]
        first, third = ((high >> 32) & _LOW) ^ second ^ one, ((low >> 32) & _LOW) ^ fourth ^ other
        second, fourth = high & _LOW, low & _LOW
        one, other = (one + _STEPS[0]) & _LOW, (other + _STEPS[1]) & _LOW
    return [first, second, third, fourth]


def left(seed: int, rate: float, places: Sequence[Tensor]) -> Tensor:
    """Return which weights are left: booleans [rows, heads, queries, keys], for these `places` of each, as whole numbers on a CPU."""
    rows, heads, queries, keys = places
    fours, at = torch.unique_consecutive(keys // 4, return_inverse=True)
    counters = (fours, queries.view(-1, 1), heads.view(-1, 1, 1), rows.view(-1, 1, 1, 1))
    of_fours = torch.stack([word >= threshold(rate) for word in words(counters, seed)], -1)
    return of_fours.flatten(-2).index_select(-1, at * 4 + keys % 4)

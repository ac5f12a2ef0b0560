"""Compare tensors by their bits, and hash them."""

from __future__ import annotations

import torch

from zgraph.program.tolerance import bits, equal_bits


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return an integer hash of a tensor's bits: exact in any order of summation, and sensitive to moved values."""
    tensor = bits(tensor)
    total = torch.sum(tensor, dtype=torch.int64)
    for dim in range(tensor.dim() if tensor.numel() else 0):
        along = (
            tensor.sum([d for d in range(tensor.dim()) if d != dim], dtype=torch.int64)
            if tensor.dim() > 1
            else tensor.long()
        )
        total = total * 31 + (along * torch.arange(1, along.numel() + 1, device=tensor.device)).sum()
    return total.cpu()


def differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return whether two tensors of one shape and dtype differ in any bit: a 0-dim bool, on their device."""
    one, other = one.detach(), other.detach()
    if one.device.type != "cpu":
        return (bits(one) != bits(other)).any()
    return torch.tensor(not equal_bits(one, other))


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as integers: of 64 bits, if it is large and they fit."""
    words = bits(tensor.detach())
    if words.nbytes % 8 == 0 and words.nbytes > 4096 and words.is_contiguous():
        return words.view(-1).view(torch.int64)
    return words

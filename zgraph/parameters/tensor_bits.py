"""Compare tensors by their bits, and hash them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zgraph.program.tolerance import bits

if TYPE_CHECKING:
    pass


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
    one, other = bits(one.detach()), bits(other.detach())
    if one.device.type != "cpu":
        return (one != other).any()
    words = [t.reshape(-1) for t in (one, other)]
    if all(t.nbytes % 8 == 0 and t.data_ptr() % 8 == 0 for t in words):  # (takes a third of the time)
        words = [t.view(torch.int64) for t in words]
    return torch.tensor(not torch.equal(*words))


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as integers: of 64 bits, if it is large and they fit."""
    found = bits(tensor.detach())
    if found.nbytes % 8 == 0 and found.nbytes > 4096 and found.is_contiguous():
        return found.view(-1).view(torch.int64)
    return found

"""Booleans as bits: eight elements of a mask in a byte.

`zgraph::to_bits(mask, stride) -> bits` packs a dense mask of these strides in the order of its memory, eight elements to a byte, the first in
its lowest bit; the last byte is filled up with zeros. `zgraph::from_bits(bits, size, stride) -> mask` is the mask again, bit for bit. Both run
on CPUs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from zgraph.program.layout import laid_out
from zgraph.program.ops import library

library.define("to_bits(Tensor mask, SymInt[] stride) -> Tensor")
library.define("from_bits(Tensor bits, SymInt[] size, SymInt[] stride) -> Tensor")


def _to_bits(mask: Tensor, stride: list[int]) -> Tensor:
    flat = laid_out(mask, stride).as_strided([mask.numel()], [1])
    return torch.from_numpy(np.packbits(flat.numpy(), bitorder="little"))


def _from_bits(bits: Tensor, size: list[int], stride: list[int]) -> Tensor:
    flat = np.unpackbits(bits.numpy(), count=torch.Size(size).numel(), bitorder="little")
    return torch.from_numpy(flat.view(np.bool_)).as_strided(size, stride)


def _like_bits(mask: Tensor, stride: Any) -> Tensor:
    return mask.new_empty([(mask.numel() + 7) // 8], dtype=torch.uint8)


def _like_mask(bits: Tensor, size: Any, stride: Any) -> Tensor:
    return torch.empty_strided(size, stride, dtype=torch.bool, device=bits.device)


library.impl("to_bits", _to_bits, "CPU")
library.impl("from_bits", _from_bits, "CPU")
torch.library.register_fake("zgraph::to_bits", _like_bits, lib=library)
torch.library.register_fake("zgraph::from_bits", _like_mask, lib=library)

TO_BITS = torch.ops.zgraph.to_bits.default
FROM_BITS = torch.ops.zgraph.from_bits.default

"""Torch's attention on a CPU, forward and backward: the operators that passes look for, and the kernel of zgraph's own ones."""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten

FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
TENSORS = {FORWARD: 3, BACKWARD: 6}
"""How many tensors each takes first: query, key and value, and of the backward the tangent before and both results after these."""


def like_forward(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    """Return uninitialized results of an attention on a CPU, in the layout of torch's own."""
    rows, heads, length = query.shape[:3]
    sum_dtype = torch.float32 if query.dtype in (torch.bfloat16, torch.float16) else query.dtype
    sums = torch.empty((rows, length, heads), dtype=sum_dtype, device=query.device).transpose(1, 2)
    return torch.empty_like(query), sums


def like_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized gradients of query, key and value, in the layout of torch's own."""
    first, second, third = (
        torch.empty_permuted(x.size(), (0, 2, 1, 3), dtype=x.dtype, device=x.device) for x in (query, key, value)
    )
    return first, second, third

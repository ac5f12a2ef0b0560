"""Sparse attention in a model's own code: the operator that compiled models have in their programs, on CPUs and CUDA devices."""

from __future__ import annotations

import torch
from torch import Tensor

from zgraph.codegen import kernels
from zgraph.errors import UnsupportedError, refuse_unless
from zgraph.plan.attention import Sparsity
from zgraph.program.attention_dropout import SEEDS
from zgraph.program.sparse_attention import SPARSE, layout_text

__all__ = ["kernels", "sparse_attention"]  # (the kernels of CUDA devices are registered)


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparsity: Sparsity,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Return attention [rows, heads, length, width] that computes only the blocks of a sparsity, in any model on a CPU or a CUDA device.

    Keys and values may have fewer heads, which divide the queries'. `attn_mask` (booleans that are true where a query sees a key, or numbers
    that are added to the scores) and `is_causal` hide keys besides; a query that sees no key has output 0. `scale` is that of the scores, by
    default 1 / sqrt(width). A mask that requires a gradient gets one on a CPU. A compiled model has the same operator in its program. Raises
    `UnsupportedError` on other devices, and on CUDA for what its kernels do not serve, `PlanError` for a layout or a mask function that does not
    fit.
    """
    refuse_unless(
        isinstance(sparsity, Sparsity),
        "zgraph.sparse_attention(sparsity=…)",
        sparsity,
        "a sparsity",
        hint="zgraph.SlidingWindow(), say",
    )
    if query.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"sparse attention on {query.device.type}",
            why="there are kernels for CPUs and CUDA devices alone",
            hint="scaled_dot_product_attention with a mask",
        )
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros(attn_mask.shape, dtype=query.dtype, device=attn_mask.device).masked_fill(
            ~attn_mask, -torch.inf
        )
    seed = torch.randint(*SEEDS, (1,), device=query.device) if dropout_p else None
    out: Tensor = SPARSE(query, key, value, attn_mask, is_causal, scale, layout_text(sparsity), seed, dropout_p)[0]
    return out

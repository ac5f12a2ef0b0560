"""Torch's attention, whichever operator computes it: that of CPUs, or flash, memory-efficient and cuDNN attention on accelerators.

Their arguments and results differ. All take query, key and value first (a backward has the tangent before), and give the output first and a
logarithm of sums second. That is [rows, heads, length] of CPUs and of flash attention, padded to a multiple of 32 of memory-efficient attention,
and [rows, heads, length, 1] of cuDNN's; only their own backward reads it. What follows (lengths, states of random numbers, a mask of what was
dropped) serves documents and dropout. A mask is `attn_mask` or `attn_bias`, and flash attention has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zgraph.program import cpu_attention
from zgraph.torch_compat.symbols import expression

aten = torch.ops.aten

BACKWARDS = {
    cpu_attention.FORWARD: cpu_attention.BACKWARD,
    aten._scaled_dot_product_flash_attention.default: aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention.default: aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention.default: aten._scaled_dot_product_cudnn_attention_backward.default,
}
"""The operators of attention, each with that of its backward."""
FORWARDS = frozenset(BACKWARDS)
_ALL = FORWARDS | frozenset(BACKWARDS.values())
_OPERANDS = ("grad_out", "grad_out_", "query", "key", "value", "out", "logsumexp")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernels of sparse attention on CUDA devices serve."""
WIDEST = 256
"""The most numbers of a head that they serve."""


@dataclass(frozen=True)
class AttentionCall:
    """What an attention, or its backward, is called with."""

    operands: tuple[
        Any, ...
    ]  # query, key, value; of a backward with the tangent before, output and logarithms of sums behind
    attn_mask: Any  # a node, None without a mask
    dropout: float  # the share of weights that are dropped
    is_causal: bool  # whether a query sees no later key
    scale: Any  # a number, None for the usual one
    is_forward: bool  # whether it is no backward

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Query, key and value."""
        return self.operands[:3] if self.is_forward else self.operands[1:4]


def read(node: fx.Node) -> AttentionCall | None:
    """Return what an attention is called with; None for every other node."""
    if node.target not in _ALL:
        return None
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip([argument.name for argument in schema], node.args, strict=False)) | node.kwargs
    return AttentionCall(
        tuple(given[argument.name] for argument in schema if argument.name in _OPERANDS),
        given.get("attn_mask", given.get("attn_bias")),
        float(given.get("dropout_p", 0.0)),  # type: ignore[arg-type]
        bool(given.get("is_causal", False)),
        given.get("scale"),
        node.target in FORWARDS,
    )


def unserved(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> str | None:
    """Return what of an attention the kernels of sparse attention on CUDA devices do not serve; None if they serve it."""
    (rows, heads, length, width), of_keys, of_values = (
        [expression(size) for size in x.shape] for x in (query, key, value)
    )
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        return f"attention of {query.dtype}"
    if width > WIDEST:
        return f"attention with heads of {width} numbers"
    if of_keys != of_values or of_keys != [rows, of_keys[1], length, width]:
        return f"attention of queries {[rows, heads, length, width]} with keys {of_keys} and values {of_values}"
    if not of_keys[1] or heads % of_keys[1]:
        return f"attention of {heads} heads with {of_keys[1]} heads of keys"
    return None

"""The floating-point operations of products, by torch's formulas (`torch.utils.flop_counter`) and, for what its table lacks, by the
same formulas."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from zgraph.program.attention_of_heads import OF_HEADS
from zgraph.program.attention_of_rows import OF_ROWS
from zgraph.program.node import value
from zgraph.program.sparse_attention import (
    LAYOUT_AT,
    SPARSE,
    SPARSE_BACKWARD,
    SPARSE_BACKWARD_WITH_MASK,
    counted_blocks,
    longest,
)

aten = torch.ops.aten
_LONG = 4096  # the length (if a layout is for such) whose share of blocks stands for that of symbolic lengths


def _attention(query: Any, key: Any, values: Any, *rest: Any, **options: Any) -> Any:
    """Return the operations of an attention of tensors of these shapes, whatever its other arguments are: two products for each head of
    the queries."""
    return 2 * query[0] * query[1] * query[2] * key[2] * (query[3] + values[3])


def _attention_backward(grad_out: Any, query: Any, key: Any, values: Any, *rest: Any, **options: Any) -> Any:
    """Return the operations of its backward: the scores once more, and the gradients of values, scores, queries and keys."""
    return 2 * query[0] * query[1] * query[2] * key[2] * (3 * query[3] + 2 * values[3])


def _sparse_attention(query: Any, key: Any, values: Any, *rest: Any, **options: Any) -> Any:
    return _share(query, rest[LAYOUT_AT[SPARSE] - 3], _attention(query, key, values))


def _sparse_attention_backward(grad_out: Any, query: Any, key: Any, values: Any, *rest: Any, **options: Any) -> Any:
    return _share(query, rest[LAYOUT_AT[SPARSE_BACKWARD] - 4], _attention_backward(grad_out, query, key, values))


def _of_heads(formula: Callable[..., Any], query_at: int) -> Callable[..., Any]:
    """Return the operations of sparse attention of a rank's part of the heads: its part of those of all."""

    def of_part(*given: Any, **options: Any) -> Any:
        *shapes, _, ranks = given
        rows, heads, *rest = shapes[query_at]
        shapes[query_at] = (rows, heads * ranks, *rest)
        return formula(*shapes) // ranks

    return of_part


def _of_rows(formula: Callable[..., Any], query_at: int) -> Callable[..., Any]:
    """Return the operations of sparse attention of a rank's rows: its part of those of all."""

    def of_part(*given: Any, **options: Any) -> Any:
        *shapes, _, ranks, _ = given
        length = shapes[query_at][2] * ranks
        for at in range(query_at, query_at + 3):
            shapes[at] = (*shapes[at][:2], length, shapes[at][3])
        return formula(*shapes) // ranks

    return of_part


def _share(query: Any, layout: str, whole: Any) -> Any:
    """Return the operations of the blocks of a layout; a symbolic length has the share of a long one."""
    typical = (1, longest(layout, _LONG))
    heads, length = (size if type(size) is int else known for size, known in zip(query[1:3], typical, strict=True))
    computed, all_blocks = counted_blocks(layout, heads, length)
    return whole * computed // all_blocks


# Attention: shapes of the arguments to operations, as `FlopCounterMode(custom_mapping=…)` takes it. Torch's table lacks that on a CPU, and torch
# 2.11's fails where keys have fewer heads. (What packed attention costs depends on the lengths of its documents, which no program knows.)
BEYOND_TORCH: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._scaled_dot_product_flash_attention: _attention,
    aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    aten._scaled_dot_product_efficient_attention: _attention,
    aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    aten._scaled_dot_product_cudnn_attention: _attention,
    aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
    SPARSE.overloadpacket: _sparse_attention,
    SPARSE_BACKWARD.overloadpacket: _sparse_attention_backward,
    SPARSE_BACKWARD_WITH_MASK.overloadpacket: _sparse_attention_backward,
    OF_HEADS[SPARSE].overloadpacket: _of_heads(_sparse_attention, 0),
    OF_HEADS[SPARSE_BACKWARD].overloadpacket: _of_heads(_sparse_attention_backward, 1),
    OF_HEADS[SPARSE_BACKWARD_WITH_MASK].overloadpacket: _of_heads(_sparse_attention_backward, 1),
    OF_ROWS[SPARSE].overloadpacket: _of_rows(_sparse_attention, 0),
    OF_ROWS[SPARSE_BACKWARD].overloadpacket: _of_rows(_sparse_attention_backward, 1),
}


@functools.cache
def _formulas() -> dict[Any, Callable[..., Any]]:
    from torch.utils.flop_counter import flop_registry, shape_wrapper

    return {**flop_registry, **{target: shape_wrapper(formula) for target, formula in BEYOND_TORCH.items()}}


def product_flops(node: fx.Node) -> Any:
    """Return the floating-point operations of a product (matmul, convolution, attention), an int or a symbolic one; 0 for
    every other node."""
    formula = _formulas().get(getattr(node.target, "overloadpacket", None))
    if node.op != "call_function" or formula is None:
        return 0
    args: Any = fx.node.map_arg(node.args, value)
    kwargs: Any = fx.node.map_arg(node.kwargs, value)
    return formula(*args, **kwargs, out_val=value(node))

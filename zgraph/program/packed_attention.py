"""Attention within documents that are packed into rows, without a mask of rows x rows: an operator, and its backward.

`zgraph::packed_attention(query, key, value, documents, order, is_causal, scale) -> (out, logsumexp)` is attention in
which a query sees the keys of its own document: those with the same number in `documents` [rows or 1, length]. With
`is_causal` it sees of these only those that are not behind it: by position, or by `order` [rows or 1, length]. Each
document is computed by itself, by the same kernel that would compute it alone, so the work is the sum of the
documents' squared lengths. Documents that are not contiguous, and an order that does not ascend in them, are computed
with a mask, of one row or of one document.

`zgraph::packed_block` has queries and keys at different positions (parts of rows on different ranks), with the
`documents` and the `order` of both. A query that sees none of the keys has output 0 and logsumexp -inf. Only the spans
that hold documents of both are computed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zgraph.program.cpu_attention import BACKWARD, FORWARD, like_backward, like_forward
from zgraph.program.ops import library

_DOCUMENTS = "Tensor documents, Tensor? order, bool is_causal, float? scale"
library.define(f"packed_attention(Tensor query, Tensor key, Tensor value, {_DOCUMENTS}) -> (Tensor, Tensor)")
library.define(
    "packed_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
    f"{_DOCUMENTS}) -> (Tensor, Tensor, Tensor)"
)
_OTHERS = "Tensor documents, Tensor other_documents, Tensor? order, Tensor? other_order, bool is_causal, float? scale"
library.define(f"packed_block(Tensor query, Tensor key, Tensor value, {_OTHERS}) -> (Tensor, Tensor)")
library.define(
    "packed_block_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
    f"{_OTHERS}) -> (Tensor, Tensor, Tensor)"
)
BLOCK = torch.ops.zgraph.packed_block.default
BLOCK_BACKWARD = torch.ops.zgraph.packed_block_backward.default
PACKED = torch.ops.zgraph.packed_attention.default
PACKED_BACKWARD = torch.ops.zgraph.packed_attention_backward.default

_Block = tuple[slice, slice, Tensor | None]
"""Rows, a part of their length, and the mask to add there (None: all keys, or with `is_causal` all that are not behind)."""


def _blocks(documents: Tensor, order: Tensor | None, is_causal: bool, like: Tensor) -> Iterator[_Block]:
    """Yield the blocks that are computed separately, for rows of the shape of `like` [rows, heads, length, width]."""
    rows, length = like.shape[0], like.shape[2]
    new = (documents[:, 1:] != documents[:, :-1]).tolist()
    firsts = [[0, *(at + 1 for at, is_new in enumerate(row) if is_new)] for row in new]
    in_pieces = [len(set(ids)) < len(first) for ids, first in zip(documents.tolist(), firsts, strict=True)]
    steps = order[:, 1:] > order[:, :-1] if is_causal and order is not None else None
    rows_by_span: dict[tuple[int, int], list[int]] = {}
    for row in range(rows):
        document_row = row % len(firsts)
        lasts = [*firsts[document_row][1:], length]
        for first, last in [(0, length)] if in_pieces[document_row] else zip(firsts[document_row], lasts, strict=True):
            ascends = steps is None or bool(steps[row % len(steps), first : last - 1].all())
            if ascends and not in_pieces[document_row]:
                rows_by_span.setdefault((first, last), []).append(row)
                continue
            yield slice(row, row + 1), slice(first, last), _mask(documents, order, is_causal, like, row, first, last)
    for (first, last), span_rows in rows_by_span.items():
        for row_slice in [slice(0, rows)] if len(span_rows) == rows else [slice(row, row + 1) for row in span_rows]:
            yield row_slice, slice(first, last), None


def _mask(
    documents: Tensor, order: Tensor | None, is_causal: bool, like: Tensor, row: int, first: int, last: int
) -> Tensor:
    """Return the additive mask of a part of a row."""
    ids = documents[row % len(documents), first:last]
    shown = ids.unsqueeze(1) == ids
    if is_causal:
        places = torch.arange(last - first) if order is None else order[row % len(order), first:last]
        shown &= places <= places.unsqueeze(1)
    return torch.zeros(shown.shape, dtype=like.dtype).masked_fill_(~shown, -torch.inf)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    order: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    out, sums = like_forward(query, key, value, documents, order, is_causal, scale)
    for rows, part, mask in _blocks(documents, order, is_causal, query):
        block_inputs = (x[rows, :, part] for x in (query, key, value))
        block_outputs = FORWARD(*block_inputs, 0.0, is_causal and mask is None, attn_mask=mask, scale=scale)
        out[rows, :, part], sums[rows, :, part] = block_outputs
    return out, sums


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    documents: Tensor,
    order: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = like_backward(grad_out, query, key, value)
    for rows, part, mask in _blocks(documents, order, is_causal, query):
        block_inputs = (x[rows, :, part] for x in (grad_out, query, key, value, out, logsumexp))
        block_grads = BACKWARD(*block_inputs, 0.0, is_causal and mask is None, attn_mask=mask, scale=scale)
        for grad, block_grad in zip(grads, block_grads, strict=True):
            grad[rows, :, part] = block_grad
    return grads


def _seen(
    documents: Tensor, others: Tensor, order: Tensor | None, other_order: Tensor | None, rows: int
) -> Iterator[tuple[slice, slice, slice, Tensor | None]]:
    """Yield, for each row, the spans of queries and keys whose documents both sides have, and which keys each query
    sees (None: all)."""
    for row in range(rows):
        mine, theirs = documents[row % len(documents)], others[row % len(others)]
        parts = [_span(torch.isin(a, b)) for a, b in ((mine, theirs), (theirs, mine))]
        if parts[0] is None or parts[1] is None:
            continue
        queries, keys = parts[0], parts[1]
        shown = mine[queries].unsqueeze(1) == theirs[keys]
        if order is not None and other_order is not None:
            shown &= other_order[row % len(other_order)][keys] <= order[row % len(order)][queries].unsqueeze(1)
        if shown.any():
            yield slice(row, row + 1), queries, keys, None if shown.all() else shown


def _span(chosen: Tensor) -> slice | None:
    """Return the slice from the first true element to the last, or None if there is none."""
    at = chosen.nonzero()
    return slice(int(at[0]), int(at[-1]) + 1) if len(at) else None


def _added(shown: Tensor | None, like: Tensor) -> Tensor | None:
    if shown is None:
        return None
    return torch.zeros(shown.shape, dtype=like.dtype).masked_fill_(~shown, -torch.inf)


def _block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    others: Tensor,
    order: Tensor | None,
    other_order: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    out, sums = like_forward(query, key, value)
    out.zero_()
    sums.fill_(-torch.inf)
    orders = (order, other_order) if is_causal else (None, None)
    for rows, queries, keys, shown in _seen(documents, others, *orders, query.shape[0]):
        block_inputs = query[rows, :, queries], key[rows, :, keys], value[rows, :, keys]
        block_out, block_sums = FORWARD(*block_inputs, 0.0, False, attn_mask=_added(shown, query), scale=scale)
        if shown is not None:
            sees = shown.any(1).unsqueeze(-1)
            block_out, block_sums = (
                torch.where(sees, block_out, 0.0),
                torch.where(sees.squeeze(-1), block_sums, -torch.inf),
            )
        out[rows, :, queries], sums[rows, :, queries] = block_out, block_sums
    return out, sums


def _block_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    documents: Tensor,
    others: Tensor,
    order: Tensor | None,
    other_order: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = [x.zero_() for x in like_backward(grad_out, query, key, value)]
    orders = (order, other_order) if is_causal else (None, None)
    for rows, queries, keys, shown in _seen(documents, others, *orders, query.shape[0]):
        parts = (queries, queries, keys, keys, queries, queries)
        block_inputs = (
            x[rows, :, at] for x, at in zip((grad_out, query, key, value, out, logsumexp), parts, strict=True)
        )
        block_grads = BACKWARD(*block_inputs, 0.0, False, attn_mask=_added(shown, query), scale=scale)
        for grad, block_grad, at in zip(grads, block_grads, (queries, keys, keys), strict=True):
            grad[rows, :, at] = block_grad
    return grads[0], grads[1], grads[2]


library.impl("packed_attention", _forward, "CPU")
library.impl("packed_attention_backward", _backward, "CPU")
library.impl("packed_block", _block, "CPU")
library.impl("packed_block_backward", _block_backward, "CPU")
torch.library.register_fake("zgraph::packed_attention", like_forward, lib=library)
torch.library.register_fake("zgraph::packed_attention_backward", like_backward, lib=library)
torch.library.register_fake("zgraph::packed_block", like_forward, lib=library)
torch.library.register_fake("zgraph::packed_block_backward", like_backward, lib=library)

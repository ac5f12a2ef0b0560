"""Attention of some blocks of queries with some blocks of keys, by the layouts of `zgraph.plan.attention`: an operator, and its backward.

`zgraph::sparse_attention(query, key, value, attn_mask, is_causal, scale, layout) -> (out, logsumexp)` is attention [rows, heads, length,
width] whose layout (a record as JSON) hides what its blocks leave out, besides `attn_mask` (added to the scores) and `is_causal`. Keys may
have fewer heads. It works piece by piece (rows of blocks, or some that see nearly the same), with the keys that a piece sees gathered side
by side, by the kernel of whole attention; so its work is that of the blocks, and it holds no value of length x length. A query that sees no
key has output 0.

With a `seed` (int64 of one element) weights are dropped at the rate `dropout_p`, by `zgraph.program.attention_dropout`; the backward drops the
same. The kernel of whole attention has no dropout on CPUs: then rows of blocks, or parts of them, are computed by products and a softmax.
"""

from __future__ import annotations

import functools
import hashlib
import re
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zgraph.errors import PlanError
from zgraph.plan.attention import BlockLayout, MaskFunction, PartOfHeads, SlidingWindow, Sparsity, sparsity_of
from zgraph.plan.user_functions import load_named
from zgraph.program import attention_dropout
from zgraph.program.attention_pieces import Piece, as_indices, as_slice, divided
from zgraph.program.cpu_attention import BACKWARD, FORWARD, like_backward, like_forward
from zgraph.program.ops import library

# Elements of a mask function's result that are computed at once, to see which blocks it leaves empty.
_ROWS_AT_ONCE = 1 << 22
# Scores that are computed at once where weights are dropped.
_SCORES_AT_ONCE = 1 << 20

_DROPOUT = "Tensor? seed=None, float dropout_p=0.0"
_OPTIONS = f"Tensor? attn_mask, bool is_causal, float? scale, str layout, {_DROPOUT}"
library.define(f"sparse_attention(Tensor query, Tensor key, Tensor value, {_OPTIONS}) -> (Tensor, Tensor)")
library.define(
    "sparse_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)"
)
library.define(
    "sparse_attention_backward_with_mask(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
    f"Tensor attn_mask, bool is_causal, float? scale, str layout, {_DROPOUT}) -> (Tensor, Tensor, Tensor, Tensor)"
)
SPARSE = torch.ops.zgraph.sparse_attention.default
SPARSE_BACKWARD = torch.ops.zgraph.sparse_attention_backward.default
SPARSE_BACKWARD_WITH_MASK = torch.ops.zgraph.sparse_attention_backward_with_mask.default

LAYOUT_AT: dict[Any, int] = {
    target: [a.name for a in target._schema.arguments].index("layout")
    for target in (SPARSE, SPARSE_BACKWARD, SPARSE_BACKWARD_WITH_MASK)
}
"""Which argument of each operator is the layout."""

_WHOLE = slice(None)
_PLAIN = (bool, int, float, str, bytes, type(None))


# -- layouts ----------------------------------------------------------------------------------------------------------
@functools.lru_cache(maxsize=256)
def block_rows(layout: str, heads: int, length: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return, for one head (if all are alike) or for each, the blocks of keys that each block of queries sees."""
    sparsity = sparsity_of(layout)
    blocks = -(-length // sparsity.block)
    if isinstance(sparsity, PartOfHeads):
        rows = block_rows(sparsity.whole, sparsity.heads, length)
        return rows if len(rows) == 1 else rows[sparsity.first : sparsity.first + heads]
    if isinstance(sparsity, MaskFunction):
        return _rows_of_function(sparsity, heads, length)
    if isinstance(sparsity, BlockLayout) and len(sparsity.layout) not in (1, heads):
        raise PlanError(
            f"the layout is for {len(sparsity.layout)} heads, and attention has {heads}",
            where="attention",
            hint="give one square of blocks for all heads, or one for each",
        )
    each = range(heads if sparsity.heads_differ else 1)
    return tuple(tuple(tuple(sorted(row)) for row in sparsity.rows(blocks, head)) for head in each)


def _rows_of_function(sparsity: MaskFunction, heads: int, length: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    side, blocks = sparsity.block, -(-length // sparsity.block)
    rows: list[list[tuple[int, ...]]] = [[] for _ in range(heads)]
    keys = torch.arange(length)
    for start in range(0, length, side):
        queries = torch.arange(start, min(start + side, length))
        for first in range(0, heads, each := max(1, _ROWS_AT_ONCE // (side * length))):
            chosen = torch.arange(first, min(first + each, heads))
            shown = shown_by(sparsity, chosen, queries, keys)
            filled = (
                torch.nn.functional.pad(shown.any(1), (0, blocks * side - length))
                .view(len(chosen), blocks, side)
                .any(2)
            )
            for head, row in zip(chosen.tolist(), filled, strict=True):
                rows[head].append(tuple(row.nonzero().flatten().tolist()))
    same = all(row == rows[0] for row in rows)
    return tuple(map(tuple, rows[:1] if same and _is_of_all_heads(sparsity, heads, length) else rows))


def _is_of_all_heads(sparsity: MaskFunction, heads: int, length: int) -> bool:
    """Return whether a mask function shows the same for all heads."""
    keys, first = torch.arange(length), torch.zeros(1, dtype=torch.int64)
    for start in range(0, length, sparsity.block):
        queries = torch.arange(start, min(start + sparsity.block, length))
        shown = shown_by(sparsity, first, queries, keys)
        if any(not torch.equal(shown, shown_by(sparsity, first + head, queries, keys)) for head in range(1, heads)):
            return False
    return True


def shown_by(sparsity: Sparsity, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return what a sparsity of positions shows, [heads, queries, keys]. Raises `PlanError` for a mask function that fails, or gives
    something else."""
    if isinstance(sparsity, PartOfHeads):
        return shown_by(sparsity.sparsity, heads + sparsity.first, queries, keys)
    if isinstance(sparsity, SlidingWindow):
        distances = queries.view(-1, 1) - keys
        shown = (distances < sparsity.window) & (distances >= -sparsity.ahead)
        return shown.expand(len(heads), -1, -1)
    assert isinstance(sparsity, MaskFunction)
    function: Callable[..., Tensor] = load_named(sparsity.function, "mask function")
    where, shape = f"attention: {sparsity.function}", (len(heads), len(queries), len(keys))
    rows = torch.arange(2).view(2, 1, 1, 1)
    try:
        shown = function(rows, heads.view(1, -1, 1, 1), queries.view(1, 1, -1, 1), keys.view(1, 1, 1, -1))
        first, second = torch.broadcast_to(shown, (2, *shape))
    except Exception as error:
        raise PlanError(
            "a mask function fails",
            where=where,
            why=f"{type(error).__name__}: {error}",
            hint="it gets (batch, head, query, key) as tensors of whole numbers that broadcast, and returns a tensor of booleans: "
            "operators of tensors, & and | in place of and, or, if",
        ) from error
    if shown.dim() == 4 and len(shown) == 2 and not torch.equal(first, second):
        raise PlanError(
            "a mask function shows rows of a batch different keys",
            where=where,
            why="a layout is one for all rows",
            hint="give what differs from row to row as the model's own mask",
        )
    whole = first
    if whole.dtype is not torch.bool:
        raise PlanError(
            f"a mask function gives {whole.dtype}, not booleans", where=where, hint="return a comparison, not a number"
        )
    return whole


def counted_blocks(layout: str, heads: int, length: int) -> tuple[int, int]:
    """Return (the number of blocks that are computed, the number of all blocks), of the heads whose layouts differ."""
    rows = block_rows(layout, heads, length)
    return sum(len(row) for head in rows for row in head), max(1, sum(len(head) ** 2 for head in rows))


def longest(layout: str, wanted: int) -> int:
    """Return the wanted length, or the largest that the layout is for if that is less."""
    sparsity = sparsity_of(layout)
    return min(wanted, len(sparsity.layout[0]) * sparsity.block) if isinstance(sparsity, BlockLayout) else wanted


def pieces_of(layout: str, heads: int, length: int, is_causal: bool) -> tuple[Piece, ...]:
    """Return the pieces of a layout for whole sequences, of which each has the keys that all of its queries see."""
    sparsity = sparsity_of(layout)
    alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    rows_of_heads = block_rows(layout, heads, length)
    for head, rows in enumerate(rows_of_heads):
        alike.setdefault(rows, []).append(head)
    pieces: list[Piece] = []
    for rows, of in alike.items():
        whole = len(rows_of_heads) == 1 or (len(of) == heads and not sparsity.of_positions)
        chosen = _WHOLE if whole else torch.tensor(of)
        pieces += _of_heads(sparsity, rows, chosen, length, is_causal)
    return tuple(pieces)


def _of_heads(
    sparsity: Sparsity, rows: Sequence[tuple[int, ...]], heads: slice | Tensor, length: int, is_causal: bool
) -> Iterator[Piece]:
    side = sparsity.block
    if is_causal:
        rows = [tuple(block for block in row if block <= at) for at, row in enumerate(rows)]
    at = 0
    while at < len(rows):
        last = at + 1
        while last < len(rows) and rows[last] == rows[at]:
            last += 1
        if rows[at]:
            queries = slice(at * side, min(last * side, length))
            keys = as_slice(_positions(rows[at], side, length))
            partial = {block for block in rows[at] if is_causal and block >= at}
            if sparsity.of_positions:
                partial |= {block for row in range(at, last) for block in rows[row] if sparsity.is_partial(row, block)}
            yield Piece(heads, queries, queries.start, keys, keys, sum(1 << block for block in partial))
        at = last


def _positions(blocks: Sequence[int], side: int, length: int) -> Tensor:
    positions = (torch.tensor(blocks).unsqueeze(1) * side + torch.arange(side)).flatten()
    return positions[: int(torch.searchsorted(positions, length))]


@dataclass(frozen=True)
class Attention:
    """What is computed: a layout's attention of whole sequences."""

    layout: str  # the layout
    heads: int  # the number of heads
    length: int  # the length of the sequence
    is_causal: bool  # whether a query sees no later key

    def rows(self) -> Sequence[Piece]:
        """Return pieces of rows of blocks, of which each has all of its keys."""
        return pieces_of(self.layout, self.heads, self.length, self.is_causal)


@functools.lru_cache(maxsize=64)
def _rows(attention: Attention) -> Sequence[Piece]:
    return attention.rows()


@functools.lru_cache(maxsize=64)
def divided_pieces(attention: Attention, *, parts: bool) -> tuple[Piece, ...]:
    """Return the pieces that take the least time; a query's keys are in several only with `parts`."""
    return tuple(divided(attention.rows(), sparsity_of(attention.layout).block, parts=parts))


@dataclass(frozen=True)
class _Dropout:
    """Which weights are dropped."""

    seed: int  # the seed of this call
    rate: float  # the share that is dropped
    first: int  # which of all heads the first of these is

    @classmethod
    def of(cls, sparsity: Sparsity, seed: Tensor | None, rate: float) -> _Dropout | None:
        return None if seed is None else cls(int(seed), rate, first_head(sparsity))


def first_head(sparsity: Sparsity) -> int:
    """Return which of all heads the first is that a sparsity is for."""
    return sparsity.first if isinstance(sparsity, PartOfHeads) else 0


def pieces_at_once(attention: Attention, rows: int) -> Iterator[Piece]:
    """Yield what is computed at once where weights are dropped: no more than `_SCORES_AT_ONCE` scores (or one query's)."""
    for piece in _rows(attention):
        heads = attention.heads if isinstance(piece.heads, slice) else len(piece.heads)
        each = max(1, _SCORES_AT_ONCE // max(1, rows * heads * len(as_indices(piece.keys))))
        for start in range(piece.queries.start, piece.queries.stop, each):
            queries = slice(start, min(start + each, piece.queries.stop))
            yield replace(piece, queries=queries, first=piece.first + start - piece.queries.start)


# -- running ----------------------------------------------------------------------------------------------------------
class _Parts:
    """The tensors of one piece."""

    def __init__(self, piece: Piece, query: Tensor, key: Tensor) -> None:
        self.piece = piece
        self.rows, self.heads, self.length = query.shape[:3]
        self.keys = key.shape[2]
        self.owners: Tensor | None = None  # for each head of the piece, the head of its keys; None for all as they are
        if isinstance(piece.heads, Tensor):
            self.owners = piece.heads // (query.shape[1] // key.shape[1])

    def of_queries(self, x: Tensor) -> Tensor:
        return x[:, self.piece.heads, self.piece.queries]

    def of_keys(self, x: Tensor) -> Tensor:
        x = x[:, :, self.piece.keys] if isinstance(self.piece.keys, slice) else x.index_select(2, self.piece.keys)
        return x if self.owners is None else x.index_select(1, self.owners)

    def add_to_keys(self, whole: Tensor, part: Tensor) -> None:
        """Add the gradient of the piece's keys to that of all."""
        part = part.to(whole.dtype)
        if self.owners is not None:
            heads = torch.zeros((len(part), whole.shape[1], *part.shape[2:]), dtype=whole.dtype)
            part = heads.index_add_(1, self.owners, part)
        if isinstance(self.piece.keys, slice):
            whole[:, :, self.piece.keys] += part
        else:
            whole.index_add_(2, self.piece.keys, part)

    def add_to_mask(self, whole: Tensor, part: Tensor) -> None:
        """Add the gradient of the piece's scores to that of the mask, which is one for all rows, heads, queries or keys where its size is 1."""
        whole = whole.view((1,) * (4 - whole.dim()) + tuple(whole.shape))
        shared = [dim for dim in range(4) if whole.shape[dim] == 1 != part.shape[dim]]
        part = part.sum(shared, keepdim=True) if shared else part
        whole = whole if whole.shape[2] == 1 else whole[:, :, self.piece.queries]
        if isinstance(self.piece.heads, Tensor) and whole.shape[1] != 1:
            for at, head in enumerate(self.piece.heads.tolist()):
                self._add_to_columns(whole[:, head : head + 1], part[:, at : at + 1])
        else:
            self._add_to_columns(whole, part)

    def _add_to_columns(self, whole: Tensor, part: Tensor) -> None:
        if whole.shape[3] == 1:
            whole += part
        elif isinstance(self.piece.keys, slice):
            whole[..., self.piece.keys] += part
        else:
            whole.index_add_(3, self.piece.keys, part)

    def factors(self, dropout: _Dropout, dtype: torch.dtype) -> Tensor:
        """Return what the piece's weights are multiplied by: 0 where they are dropped."""
        piece = self.piece
        heads = torch.arange(self.heads) if isinstance(piece.heads, slice) else piece.heads
        places = (torch.arange(self.rows), heads + dropout.first, self.queries(), as_indices(piece.positions))
        return attention_dropout.left(dropout.seed, dropout.rate, places).to(dtype) * attention_dropout.factor(
            dropout.rate
        )

    def queries(self) -> Tensor:
        """Return the positions of the piece's queries."""
        return torch.arange(self.piece.first, self.piece.first + self.piece.queries.stop - self.piece.queries.start)

    def mask(self, sparsity: Sparsity, attn_mask: Tensor | None, is_causal: bool, like: Tensor) -> Tensor | None:
        """Return the mask that is added to the piece's scores, None for none."""
        piece = self.piece
        added = None
        if attn_mask is not None:
            added = attn_mask.expand(*attn_mask.shape[:-2], self.length, self.keys)[..., piece.queries, :]
            added = added[..., piece.keys] if isinstance(piece.keys, slice) else added.index_select(-1, piece.keys)
            if isinstance(piece.heads, Tensor) and added.dim() == 4 and added.shape[1] != 1:
                added = added.index_select(1, piece.heads)
        if not piece.partial and piece.seen is None:
            return added
        queries, keys = self.queries(), as_indices(piece.positions)
        shown = piece.shown(queries)
        if is_causal and piece.partial:
            earlier = keys <= queries.unsqueeze(1)
            shown = earlier if shown is None else shown & earlier
        if sparsity.of_positions and piece.partial:
            heads = torch.zeros(1, dtype=torch.int64) if isinstance(piece.heads, slice) else piece.heads
            of_positions = shown_by(sparsity, heads, queries, keys)
            shown = of_positions if shown is None else shown & of_positions
        assert shown is not None
        if added is None:
            added = torch.zeros((), dtype=like.dtype)
        whole = torch.where(shown, added, torch.tensor(-torch.inf, dtype=added.dtype))
        return whole.unsqueeze(0) if whole.dim() == 3 else whole


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    layout: str,
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
    attention: Attention | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute an attention on a CPU: by default the layout's of whole sequences."""
    out, sums = like_forward(query, key, value)
    out.zero_()
    sums.fill_(-torch.inf)
    sparsity = sparsity_of(layout)
    refuse_changed(sparsity)
    dropout = _Dropout.of(sparsity, seed, dropout_p)
    attention = attention or Attention(layout, query.shape[1], query.shape[2], is_causal)
    if dropout is None:
        # (In half precision a query's keys are in one piece: the outputs of several would be rounded before they are added.)
        pieces = divided_pieces(attention, parts=query.dtype in (torch.float32, torch.float64))
    else:
        pieces = tuple(pieces_at_once(attention, len(query)))
    for piece in pieces:
        parts = _Parts(piece, query, key)
        mask = parts.mask(sparsity, attn_mask, is_causal, query)
        given = (parts.of_queries(query), parts.of_keys(key), parts.of_keys(value))
        if dropout is None:
            part_out, part_sums = FORWARD(*given, 0.0, False, attn_mask=mask, scale=scale)
        else:
            part_out, part_sums = _with_dropout(given, mask, scale, parts.factors(dropout, sums.dtype))
        if not piece.alone:
            before = (parts.of_queries(out), parts.of_queries(sums))
            part_out, part_sums = _put_together(before, (part_out, part_sums), mask)
        out[:, piece.heads, piece.queries] = part_out.to(out.dtype)
        sums[:, piece.heads, piece.queries] = part_sums
        del parts, mask, given, part_out, part_sums  # (so that the next piece's do not stand beside them)
    return out, sums.masked_fill_(sums == -torch.inf, 0.0)


def _put_together(
    before: tuple[Tensor, Tensor], part: tuple[Tensor, Tensor], mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return outputs and logarithms of sums over the keys so far and over a part of the rest, whose scores had this mask."""
    (out, sums), (part_out, part_sums) = before, part
    if mask is not None:
        # (The kernel gives 0 for a query that sees no key.)
        part_sums = part_sums.masked_fill(mask.amax(-1) == -torch.inf, -torch.inf)
    total = torch.logaddexp(sums, part_sums)
    finite = total.masked_fill(total == -torch.inf, 0.0)
    share, part_share = (torch.exp(x - finite).unsqueeze(-1) for x in (sums, part_sums))
    return out * share + part_out * part_share, total


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    layout: str,
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
    attention: Attention | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of an attention on a CPU: by default of the layout's of whole sequences."""
    attention = attention or Attention(layout, query.shape[1], query.shape[2], is_causal)
    if seed is not None:
        read = (grad_out, query, key, value, out, logsumexp, attn_mask)
        options = (is_causal, scale, layout, seed, dropout_p)
        first, second, third = _backward_by_products(*read, *options, attention=attention, learned=False)
        return first, second, third
    results = like_backward(grad_out, query, key, value)
    # (In half precision gradients are summed over pieces in float32, and rounded once.)
    dtype = torch.promote_types(query.dtype, torch.float32)
    of_query, of_key, of_value = sums = [
        x.zero_() if x.dtype == dtype else torch.zeros_like(x, dtype=dtype) for x in results
    ]
    sparsity = sparsity_of(layout)
    refuse_changed(sparsity)
    for piece in divided_pieces(attention, parts=True):
        parts = _Parts(piece, query, key)
        mask = parts.mask(sparsity, attn_mask, is_causal, query)
        given = (
            parts.of_queries(grad_out),
            parts.of_queries(query),
            parts.of_keys(key),
            parts.of_keys(value),
            parts.of_queries(out),
            parts.of_queries(logsumexp),
        )
        wide = [x.to(dtype) for x in given]
        mask = None if mask is None else mask.to(dtype)
        part_of_query, part_of_key, part_of_value = BACKWARD(*wide, 0.0, False, attn_mask=mask, scale=scale)
        of_query[:, piece.heads, piece.queries] += part_of_query
        parts.add_to_keys(of_key, part_of_key)
        parts.add_to_keys(of_value, part_of_value)
        del parts, mask, given, wide, part_of_query, part_of_key, part_of_value
    grad_query, grad_key, grad_value = (
        x if x.dtype == dtype else x.copy_(y) for x, y in zip(results, sums, strict=True)
    )
    return grad_query, grad_key, grad_value


def _backward_by_products(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    layout: str,
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
    attention: Attention | None = None,
    learned: bool = True,
) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys, values and, if it is learned, of the mask."""
    results = like_backward(grad_out, query, key, value)
    dtype = torch.promote_types(query.dtype, torch.float32)
    of_query, of_key, of_value = (torch.zeros_like(x, dtype=dtype) for x in results)
    of_mask = torch.zeros(attn_mask.shape, dtype=dtype) if learned and attn_mask is not None else None
    sparsity = sparsity_of(layout)
    refuse_changed(sparsity)
    dropout = _Dropout.of(sparsity, seed, dropout_p)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    attention = attention or Attention(layout, query.shape[1], query.shape[2], is_causal)
    for piece in _rows(attention) if dropout is None else pieces_at_once(attention, len(query)):
        parts = _Parts(piece, query, key)
        mask = parts.mask(sparsity, attn_mask, is_causal, query)
        of_queries = [parts.of_queries(x).to(dtype) for x in (grad_out, query, out, logsumexp)]
        of_keys = [parts.of_keys(x).to(dtype) for x in (key, value)]
        factors = None if dropout is None else parts.factors(dropout, dtype)
        of_piece = _written_out(of_queries, of_keys, None if mask is None else mask.to(dtype), scale, factors)
        of_query[:, piece.heads, piece.queries] = of_piece[0]
        parts.add_to_keys(of_key, of_piece[1])
        parts.add_to_keys(of_value, of_piece[2])
        if of_mask is not None:
            parts.add_to_mask(of_mask, of_piece[3])
    gradients = tuple(x.copy_(y) for x, y in zip(results, (of_query, of_key, of_value), strict=True))
    return gradients if of_mask is None or attn_mask is None else (*gradients, of_mask.to(attn_mask.dtype))


def _with_dropout(
    given: Sequence[Tensor], mask: Tensor | None, scale: float | None, factors: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output and the logarithms of sums of queries, keys and values whose weights are multiplied by factors, in the factors' dtype."""
    query, key, value = (x.to(factors.dtype) for x in given)
    group = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = query @ keys.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if mask is None else scores + mask
    sums = scores.logsumexp(-1)
    sums = sums.masked_fill(sums == -torch.inf, 0.0)
    weights = torch.exp(scores - sums.unsqueeze(-1))
    return weights.mul_(factors) @ values, sums


def _written_out(
    of_queries: Sequence[Tensor],
    of_keys: Sequence[Tensor],
    mask: Tensor | None,
    scale: float,
    factors: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values and masked scores of whole attention, by products of its own.

    `of_queries` are the output's gradient, queries, output and logsumexp, `of_keys` keys and values; `factors` are those of the weights, None
    where none is dropped.
    """
    (grad_out, query, out, logsumexp), (key, value) = of_queries, of_keys
    group = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = query @ keys.mT * scale
    scores = scores if mask is None else scores + mask
    weights = torch.exp(scores - logsumexp.unsqueeze(-1)).masked_fill(scores == -torch.inf, 0.0)
    of_weights = grad_out @ values.mT
    dropped, products = weights, grad_out * out
    if factors is not None:
        # (The sums that are subtracted are of numbers that are as large as the rate lets them be: not by the output, which is rounded.)
        of_weights, dropped = of_weights * factors, weights * factors
        products = weights * of_weights
    of_scores = weights * (of_weights - products.sum(-1, keepdim=True))
    of_key, of_value = (
        x.unflatten(1, (-1, group)).sum(2) for x in (of_scores.mT @ query * scale, dropped.mT @ grad_out)
    )
    return of_scores @ keys * scale, of_key, of_value, of_scores


def _like_backward_with_mask(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    attn_mask: Tensor,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (*like_backward(grad_out, query, key, value), attn_mask.new_empty(attn_mask.shape))


library.impl("sparse_attention", forward, "CPU")
library.impl("sparse_attention_backward", backward, "CPU")
library.impl("sparse_attention_backward_with_mask", _backward_by_products, "CPU")
fakes: dict[Any, Callable[..., tuple[Tensor, ...]]] = {
    SPARSE: like_forward,
    SPARSE_BACKWARD: like_backward,
    SPARSE_BACKWARD_WITH_MASK: _like_backward_with_mask,
}
"""The fake implementation of each operator."""
for _target, _fake in fakes.items():
    torch.library.register_fake(_target._schema.name, _fake, lib=library)


def schema_of(target: Any) -> tuple[str, str, str]:
    """Return the name, the arguments without defaults (so that others may follow), and the results of an operator, as its schema has them."""
    given, results = str(target._schema).removeprefix("zgraph::").split(") -> ")
    name, arguments = re.sub("=[^,]+", "", given).split("(", 1)
    return name, arguments, results


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, attn_mask, is_causal, scale, layout, seed, dropout_p = inputs
    ctx.save_for_backward(query, key, value, attn_mask, *output, seed)
    ctx.options = (is_causal, scale, layout)
    ctx.dropout_p = dropout_p
    ctx.mark_non_differentiable(output[1])


def _differentiate(context: Any, grad_out: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    query, key, value, attn_mask, out, sums, seed = context.saved_tensors
    learned = context.needs_input_grad[3]
    backward = SPARSE_BACKWARD_WITH_MASK if learned else SPARSE_BACKWARD
    grads = backward(grad_out, query, key, value, out, sums, attn_mask, *context.options, seed, context.dropout_p)
    return (*grads, *([] if learned else [None]), None, None, None, None, None)


torch.library.register_autograd("zgraph::sparse_attention", _differentiate, setup_context=_save, lib=library)


@torch.compiler.assume_constant_result
def layout_text(sparsity: Sparsity) -> str:
    """Return a sparsity as the operator takes it. A mask function is called once, so that one that fails does so before anything runs, and
    a digest of its code, and of what it reads, counts in what programs are told apart by. Raises `PlanError`."""
    if isinstance(sparsity, MaskFunction):
        shown_by(sparsity, torch.zeros(1, dtype=torch.int64), torch.arange(2), torch.arange(2))
        sparsity = sparsity.model_copy(update={"code": _digest_of(sparsity)})
    return sparsity.model_dump_json()


def _digest_of(sparsity: MaskFunction) -> str:
    """Return a digest of a mask function's code, and of the numbers and texts outside of it that it reads."""
    function = load_named(sparsity.function, "mask function")
    return hashlib.sha256(repr(_read_by(function, sparsity.function, set())).encode()).hexdigest()[:16]


def _read_by(function: Any, name: str, seen: set[int]) -> list[Any]:
    """Return a function's code and what it reads outside of it. Raises `PlanError` for what may change unseen."""
    code = getattr(function, "__code__", None)
    if code is None or id(function) in seen:
        return [] if code is not None else [repr(function)]
    seen.add(id(function))
    names = [name_ for part in _codes(code) for name_ in part.co_names]
    outside = {name_: function.__globals__[name_] for name_ in names if name_ in function.__globals__}
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    outside |= {name_: cell.cell_contents for name_, cell in cells}
    parts: list[Any] = [
        [
            (part.co_code, [c for c in part.co_consts if not hasattr(c, "co_code")], part.co_names)
            for part in _codes(code)
        ]
    ]
    for name_, value in sorted(outside.items()):
        if isinstance(value, types.ModuleType | types.BuiltinFunctionType | type | torch.dtype):
            continue
        if isinstance(value, types.FunctionType):
            own = value.__module__.partition(".")[0] != "torch"
            parts.append((name_, _read_by(value, name, seen) if own else value.__qualname__))
        elif isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value)):
            parts.append((name_, value))
        else:
            raise PlanError(
                f"the mask function {name!r} reads {name_!r}, which may change without being seen",
                where="attention",
                why=f"it is {type(value).__name__}; layouts are computed once for each length",
                hint="numbers, texts and tuples of them are compared at each call; put it into one of these",
            )
    return parts


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def refuse_changed(sparsity: Sparsity) -> None:
    """Raise `PlanError` for a mask function that is not what the program was compiled with: cached layouts are those of then."""
    sparsity = sparsity.sparsity if isinstance(sparsity, PartOfHeads) else sparsity
    if isinstance(sparsity, MaskFunction) and sparsity.code and _digest_of(sparsity) != sparsity.code:
        raise PlanError(
            f"the mask function {sparsity.function!r} has changed since the model was compiled",
            where="attention",
            why="its code, or a number outside of it that it reads, is another one: layouts are computed once for each length",
            hint="compile the model again; or give each mask a function of its own",
        )

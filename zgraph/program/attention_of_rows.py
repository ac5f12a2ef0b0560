"""Sparse attention of a rank's part of a sequence, with the keys that its queries read and other ranks have.

A rank has one of n equal pieces of the sequence, or two of a folded one: the r-th and the r-th last of 2n. What the queries of any rank see of
the keys that the rank so many places before it has is a hop: all ranks send the same rows of their parts as far, since they run one program.
Where no rank sees any there is no hop. A rank gathers the rows of each hop, from the farthest rank on, and has its own behind them.

`zgraph::sparse_attention_of_rows(query, …, place, ranks, pieces)` has all arguments of `zgraph::sparse_attention`, with keys and values as
gathered by the rank at `place` (a tensor of one element). Positions (of the layout, of `is_causal`, and of what is dropped) are those of the
whole sequence, and a mask is that of the whole sequence. It runs on CPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zgraph.plan.attention import sparsity_of
from zgraph.program import sparse_attention
from zgraph.program.attention_pieces import Piece, as_indices, as_slice
from zgraph.program.ops import library
from zgraph.program.sparse_attention import (
    LAYOUT_AT,
    SPARSE,
    SPARSE_BACKWARD,
    Attention,
    block_rows,
    fakes,
    pieces_of,
    schema_of,
)

MOST_RANGES = 8
"""The most ranges of rows that a hop has: what is between the nearest is sent as well."""


# -- hops -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Hop:
    """What each rank sends to the one that is `distance` places behind it."""

    distance: int  # the number of places
    ranges: tuple[tuple[int, int], ...]  # (first, end) of the rows of its part that are sent, ascending


@functools.lru_cache(maxsize=256)
def hops_of(layout: str, heads: int, length: int, is_causal: bool, ranks: int, pieces: int) -> tuple[Hop, ...]:
    """Return the hops of a layout, the farthest first."""
    rows = [_rows_of(place, ranks, pieces, length) for place in range(ranks)]
    seen = [_seen_by(mine, layout, heads, length, is_causal) for mine in rows]
    hops = []
    for distance in range(ranks - 1, 0, -1):
        read = torch.stack([seen[place][rows[place - distance]] for place in range(ranks)]).any(0)
        if read.any():
            hops.append(Hop(distance, _ranges(read)))
    return tuple(hops)


def _rows_of(place: int, ranks: int, pieces: int, length: int) -> Tensor:
    """Return the positions of the rows that a rank has, in order."""
    each = length // (ranks * pieces)
    firsts = [place * each, (2 * ranks - 1 - place) * each][:pieces]
    return torch.cat([torch.arange(first, first + each) for first in firsts])


def _seen_by(queries: Tensor, layout: str, heads: int, length: int, is_causal: bool) -> Tensor:
    """Return which positions are in blocks that some of these queries see, booleans [length]."""
    side = sparsity_of(layout).block
    of_heads = block_rows(layout, heads, length)
    seen = torch.zeros(len(of_heads[0]), dtype=torch.bool)
    for at in torch.unique(queries // side).tolist():
        for rows in of_heads:
            seen[[block for block in rows[at] if not is_causal or block <= at]] = True
    return seen.repeat_interleave(side)[:length]


def _ranges(read: Tensor) -> tuple[tuple[int, int], ...]:
    """Return the ranges of what is true, joined over what is between the nearest if they are too many."""
    places = read.nonzero().flatten().tolist()
    gaps = [at for at in range(1, len(places)) if places[at] - places[at - 1] > 1]
    gaps = sorted(sorted(gaps, key=lambda at: places[at - 1] - places[at])[: MOST_RANGES - 1])
    return tuple(
        (places[first], places[last - 1] + 1) for first, last in zip([0, *gaps], [*gaps, len(places)], strict=True)
    )


# -- operators --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Rank:
    """Which part of a sequence a rank has."""

    place: int  # its place
    ranks: int  # the number of ranks
    pieces: int  # pieces of the sequence that each has


def _gathered(layout: str, heads: int, length: int, is_causal: bool, rank: _Rank) -> Tensor:
    """Return the positions of the keys that a rank has gathered, and of its own behind them."""
    told = (rank.ranks, rank.pieces)
    parts = []
    for hop in hops_of(layout, heads, length, is_causal, *told):
        theirs = _rows_of((rank.place - hop.distance) % rank.ranks, *told, length)
        parts += [theirs[first:end] for first, end in hop.ranges]
    return torch.cat([*parts, _rows_of(rank.place, *told, length)])


@functools.lru_cache(maxsize=64)
def _pieces_of(layout: str, heads: int, length: int, is_causal: bool, rank: _Rank) -> tuple[Piece, ...]:
    """Return the pieces of a whole sequence's attention that a rank computes, by its own rows of queries and of gathered keys."""
    told = (rank.ranks, rank.pieces)
    own = length // rank.ranks
    gathered = _gathered(layout, heads, length, is_causal, rank)
    row_of = torch.full((length,), -1)
    row_of[gathered] = torch.arange(len(gathered))
    firsts = _rows_of(rank.place, *told, length)[:: own // rank.pieces].tolist()
    return tuple(_cut(pieces_of(layout, heads, length, is_causal), firsts, own // rank.pieces, row_of))


def _cut(pieces: tuple[Piece, ...], firsts: list[int], each: int, row_of: Tensor) -> Iterator[Piece]:
    """Yield what of these pieces has queries in one of a rank's, which begin at `firsts`."""
    for at, first in enumerate(firsts):
        for piece in pieces:
            start, end = max(piece.first, first), min(piece.queries.stop, first + each)
            if start >= end:
                continue
            own = at * each - first
            keys = row_of[as_indices(piece.positions)]
            assert bool((keys >= 0).all()), "a rank has not gathered a key that its queries see"
            yield replace(piece, queries=slice(start + own, end + own), first=start, keys=as_slice(keys))


@dataclass(frozen=True)
class _OfRank(Attention):
    """What a rank computes of whole sequences."""

    rank: _Rank  # its part

    def rows(self) -> tuple[Piece, ...]:
        return _pieces_of(self.layout, self.heads, self.length, self.is_causal, self.rank)

    def mask(self, whole: Tensor) -> Tensor:
        """Return the rows and columns of a mask of whole sequences that are those of the rank's queries and gathered keys."""
        rows = _rows_of(self.rank.place, self.rank.ranks, self.rank.pieces, self.length)
        columns = _gathered(self.layout, self.heads, self.length, self.is_causal, self.rank)
        for dim, positions in ((-2, rows), (-1, columns)):
            if whole.shape[dim] != 1:
                whole = whole.index_select(dim, positions)
        return whole


OF_ROWS: dict[Any, Any] = {}
"""For each operator of sparse attention that a ring computes the one for a rank's rows."""


def _define(whole: Any, function: Callable[..., tuple[Tensor, ...]], query_at: int) -> None:
    """Define the operator for a rank's rows of what `whole`, on a CPU `function`, computes for all; `query_at` is the argument that is the
    queries."""
    of_all, given, results = schema_of(whole)
    name = f"{of_all}_of_rows"
    library.define(f"{name}({given}, Tensor place, int ranks, int pieces) -> {results}")
    names = [a.name for a in whole._schema.arguments]
    mask_at, causal_at = names.index("attn_mask"), names.index("is_causal")

    def run(*given: Any) -> tuple[Tensor, ...]:
        *arguments, place, ranks, pieces = given
        heads, rows = arguments[query_at].shape[1:3]
        rank = _Rank(int(place), ranks, pieces)
        attention = _OfRank(arguments[LAYOUT_AT[whole]], heads, rows * ranks, arguments[causal_at], rank)
        if arguments[mask_at] is not None:
            arguments[mask_at] = attention.mask(arguments[mask_at])
        return function(*arguments, attention=attention)

    library.impl(name, run, "CPU")
    torch.library.register_fake(f"zgraph::{name}", lambda *given: fakes[whole](*given[:-3]), lib=library)
    OF_ROWS[whole] = getattr(torch.ops.zgraph, name).default


_define(SPARSE, sparse_attention.forward, 0)
_define(SPARSE_BACKWARD, sparse_attention.backward, 1)

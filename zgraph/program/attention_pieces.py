"""What sparse attention computes at once on a CPU: how a layout is divided into pieces.

A piece is some queries with some of the keys that they see. The kernel of whole attention takes little longer for a few queries than for one:
what it does once for each key (it is read, and its gradients are set, computed and added to those of other pieces) costs as much as `_OF_A_KEY`
queries do. So the keys that neighbours have in common are computed for all of them at once, without a mask; of what is left each half of them
is divided in the same way, down to the rows of blocks, or until it is cheaper to compute all that is left at once, with a mask that hides from
each query what it does not see. Times are estimated in that of a score of one head.

Attention with several parts of the keys is put together by the logarithms of the sums of each, as in FlashAttention (Dao et al., 2022).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# What is done once for each key of a piece, in queries: measured, 21 to 88 by width, heads and whether keys lie side by side.
_OF_A_KEY = 48
# The time of a score with a mask beside one without: measured, 1.02 to 1.25.
_MASKED = 1.15
# What a piece takes besides, and what it takes for each query whose keys are in several pieces, in scores.
_OF_A_PIECE = 4096
_OF_A_SUM = 64
# The most scores of a head of a piece with a mask, which takes as much memory as they do.
_MOST_SCORES = 1 << 21

_POWERS = torch.tensor([1 << at for at in range(8)], dtype=torch.uint8)


@dataclass(frozen=True)
class Piece:
    """What is computed at once: some heads, some queries, and some keys of those that they see."""

    heads: slice | Tensor  # all heads, or their indices
    queries: slice  # rows of queries
    first: int  # the position of the first of them in the whole sequence
    keys: slice | Tensor  # rows of keys
    positions: slice | Tensor  # the positions of these in the whole sequence, ascending
    partial: int = 0  # the blocks of keys of which queries see a part, by position, a bit for each
    alone: bool = True  # whether these are all keys of its queries
    ends: Tensor | None = None  # where queries see different blocks: the positions at which those end that see the same
    seen: Tensor | None = None  # and which of the keys each of these sees, booleans [len(ends), keys]

    def shown(self, queries: Tensor) -> Tensor | None:
        """Return which keys queries at these positions see, by blocks, booleans [queries, keys]; None for all."""
        if self.ends is None or self.seen is None:
            return None
        return self.seen[torch.searchsorted(self.ends, queries, right=True)]


def as_slice(indices: Tensor) -> slice | Tensor:
    """Return indices as a slice, if they are those from the first to the last, one by one."""
    first, last = int(indices[0]), int(indices[-1])
    in_order = last - first + 1 == len(indices) and bool((indices.diff() == 1).all())
    return slice(first, last + 1) if in_order else indices


def as_indices(indices: slice | Tensor) -> Tensor:
    """Return a slice as the indices that it has."""
    return torch.arange(indices.start, indices.stop) if isinstance(indices, slice) else indices


def divided(pieces: Sequence[Piece], block: int, *, parts: bool) -> Iterator[Piece]:
    """Yield the cheapest pieces found for the same attention; those given have all keys of their queries.

    `block` is the layout's side of a block. Without `parts` each query has all of its keys in one piece.
    """
    runs: list[list[Piece]] = []
    for piece in pieces:
        if runs and _is_next(runs[-1][-1], piece):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    for run in runs:
        keys = torch.full((max(int(as_indices(piece.positions)[-1]) for piece in run) + 1,), -1)
        for piece in run:
            keys[as_indices(piece.positions)] = as_indices(piece.keys)
        yield from _Division([_Row.of(piece, block) for piece in run], block, parts, keys).pieces()


def _is_next(piece: Piece, other: Piece) -> bool:
    """Return whether the queries of another piece follow those of one, for the same heads."""
    rows = piece.queries.stop - piece.queries.start
    same = piece.heads is other.heads
    return same and piece.queries.stop == other.queries.start and piece.first + rows == other.first


@dataclass(frozen=True)
class _Row:
    """Queries that see the same blocks."""

    piece: Piece  # all that they see
    blocks: int  # these blocks, a bit for each
    queries: int  # the number of queries

    @classmethod
    def of(cls, piece: Piece, block: int) -> _Row:
        seen = torch.zeros(int(as_indices(piece.positions)[-1]) // block // 8 + 1, 8, dtype=torch.bool)
        seen.view(-1)[as_indices(piece.positions) // block] = True
        return cls(piece, _bits_of(seen), piece.queries.stop - piece.queries.start)


@dataclass(frozen=True)
class _Chosen:
    """Blocks of keys that are computed at once for some rows."""

    first: int  # the first of the rows
    last: int  # the row after the last
    blocks: int  # the blocks, a bit for each


@dataclass(frozen=True)
class _Division:
    """A division of rows that follow one another."""

    rows: Sequence[_Row]  # the rows
    block: int  # the side of a block
    parts: bool  # whether a query's keys may be in several pieces
    keys: Tensor  # the row of the key at each position, -1 for none

    def pieces(self) -> Iterator[Piece]:
        _, chosen = self._best(0, len(self.rows), 0)
        counts = [0] * len(self.rows)
        for part in chosen:
            for at in range(part.first, part.last):
                counts[at] += bool(self.rows[at].blocks & part.blocks)
        for part in chosen:
            yield self._piece(part, alone=max(counts[part.first : part.last]) == 1)

    def _best(self, first: int, last: int, taken: int) -> tuple[float, list[_Chosen]]:
        """Return (the time, the parts) of rows without the blocks that are taken already."""
        rows = self.rows[first:last]
        queries = sum(row.queries for row in rows)
        at_once = self._at_once(first, last, taken)
        if last - first == 1 or at_once[0] == 0.0:
            return at_once
        shared, time, chosen = self._shared(rows) & ~taken, 0.0, []
        keys = shared.bit_count() * self.block
        if self.parts and _OF_A_KEY * keys > _OF_A_PIECE + _OF_A_SUM * queries:
            time += _OF_A_PIECE + keys * (queries + _OF_A_KEY) + _OF_A_SUM * queries
            chosen.append(_Chosen(first, last, shared))
            taken |= shared
        middle = self._middle(first, last)
        halves = [self._best(first, middle, taken), self._best(middle, last, taken)]
        left = min(
            self._at_once(first, last, taken),
            (sum(half[0] for half in halves), [*halves[0][1], *halves[1][1]]),
            key=_time,
        )
        return min(at_once, (time + left[0], chosen + left[1]), key=_time)

    def _at_once(self, first: int, last: int, taken: int) -> tuple[float, list[_Chosen]]:
        """Return (the time, the part) of all that some rows see besides what is taken."""
        rows = self.rows[first:last]
        left = [row.blocks & ~taken for row in rows]
        blocks = 0
        for each in left:
            blocks |= each
        if not blocks:
            return 0.0, []
        queries, keys = sum(row.queries for row in rows), blocks.bit_count() * self.block
        masked = any(each != blocks or row.piece.partial & each for each, row in zip(left, rows, strict=True))
        if masked and len(rows) > 1 and queries * keys > _MOST_SCORES:
            return float("inf"), []
        time = _OF_A_PIECE + keys * (queries * (_MASKED if masked else 1.0) + _OF_A_KEY)
        return time, [_Chosen(first, last, blocks)]

    @staticmethod
    def _shared(rows: Sequence[_Row]) -> int:
        """Return the blocks of which all rows see every key."""
        shared = -1
        for row in rows:
            shared &= row.blocks & ~row.piece.partial
        return shared

    def _middle(self, first: int, last: int) -> int:
        """Return where rows are halved: in the middle half, where neighbours have the fewest blocks in common."""
        quarter = (last - first) // 4
        places = range(max(first + 1, first + quarter), min(last - 1, last - quarter) + 1)
        return min(
            places,
            key=lambda at: ((self.rows[at - 1].blocks & self.rows[at].blocks).bit_count(), abs(2 * at - first - last)),
        )

    def _piece(self, part: _Chosen, *, alone: bool) -> Piece:
        rows = self.rows[part.first : part.last]
        first, last = rows[0].piece, rows[-1].piece
        chosen = _flags_of(part.blocks).repeat_interleave(self.block)[: len(self.keys)]
        positions = (chosen & (self.keys[: len(chosen)] >= 0)).nonzero().flatten()
        differ = any(part.blocks & ~row.blocks for row in rows)
        partial = 0
        for row in rows:
            partial |= row.piece.partial & row.blocks & part.blocks
        of_blocks, width = positions // self.block, part.blocks.bit_length()
        keys = self.keys[positions]
        places = as_slice(positions)
        return Piece(
            first.heads,
            slice(first.queries.start, last.queries.stop),
            first.first,
            places
            if torch.equal(keys, positions)
            else as_slice(keys),  # (they are held as long as programs of this length run)
            places,
            partial,
            alone,
            torch.tensor([row.piece.first + row.queries for row in rows]) if differ else None,
            torch.stack([_flags_of(row.blocks, width)[of_blocks] for row in rows]) if differ else None,
        )


def _bits_of(flags: Tensor) -> int:
    """Return a number with a bit for each boolean, [n, 8], of which the first is the lowest."""
    return int.from_bytes((flags * _POWERS).sum(1).to(torch.uint8).numpy().tobytes(), "little")


def _flags_of(bits: int, least: int = 0) -> Tensor:
    """Return a boolean for each bit of a number, of which the lowest is the first, and for the bits after them up to `least`."""
    length = max(bits.bit_length(), least) // 8 + 1
    numbers = torch.frombuffer(bytearray(bits.to_bytes(length, "little")), dtype=torch.uint8)
    return ((numbers.unsqueeze(1) & _POWERS) != 0).view(-1)


def _time(found: tuple[float, list[_Chosen]]) -> float:
    return found[0]

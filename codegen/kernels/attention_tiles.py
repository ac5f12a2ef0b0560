"""Which tiles of queries and keys the kernels of sparse attention compute, as tensors on a device, once for each layout and length.

A tile is a square of positions, of the side that a kernel works with; a layout's blocks may be smaller or larger. For each row of tiles there is
a list of the tiles of keys that are computed (the forward, and the gradient of queries), for each column a list of the tiles of queries (the
gradients of keys and values). What a tile shows in part (by smaller blocks, a mask function, the causal mask, or because the sequence ends in
it) stands first in a list and has its positions as bits; equal tiles have their bits once. So what is stored grows with the number of tiles
that are computed, and in the worst case, where no two tiles are equal, with one bit for each of their positions.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zgraph.plan.attention import Sparsity, sparsity_of
from zgraph.program.sparse_attention import block_rows, shown_by

_Tile = tuple[int, int, int]  # row, column, and which pattern of bits it shows; WHOLE if it shows all
WHOLE = -1


@dataclass(frozen=True)
class Lists:
    """For each kind of heads, and each row (or column) of tiles, the tiles that it computes, one list behind the other."""

    bounds: (
        Tensor  # int32 [kinds, rows, 3]: where a list begins, where the tiles that are shown in part end, where it ends
    )
    tiles: Tensor  # int32: columns (or rows) of tiles
    patterns: Tensor  # int32: for each of them its pattern, WHOLE for none


@dataclass(frozen=True)
class Tiles:
    """The tiles of a layout for one length, on a device."""

    count: int  # rows of tiles, and columns
    kinds: Tensor  # int32 [heads]: heads of one kind show the same
    of_rows: Lists  # for each row of tiles the tiles of keys
    of_columns: Lists  # for each column of tiles the tiles of queries
    bits: Tensor  # uint8 [patterns, side, side / 8]: for each query of a tile a bit for each key, the lowest first


@functools.lru_cache(maxsize=64)
def tiles_of(layout: str, heads: int, length: int, is_causal: bool, side: int, device: torch.device) -> Tiles:
    """Return the tiles of a layout; raises `PlanError` as `block_rows` does."""
    patterns: dict[bytes, int] = {}
    with torch.device("cpu"):  # (whatever the user's default device is)
        kinds, kind_of = _kinds_of_heads(layout, heads, length, is_causal, side, patterns)
        bits = torch.frombuffer(bytearray(b"".join(patterns)) or bytearray(side * side // 8), dtype=torch.uint8)
        count = -(-length // side)
        return Tiles(
            count,
            _on(device, kind_of),
            _lists(kinds, 0, count, device),
            _lists(kinds, 1, count, device),
            bits.view(-1, side, side // 8).to(device),
        )


def _kinds_of_heads(
    layout: str, heads: int, length: int, is_causal: bool, side: int, patterns: dict[bytes, int]
) -> tuple[list[tuple[_Tile, ...]], list[int]]:
    """Return the tiles of each kind of heads, and the kind of each head; patterns that are new are added to `patterns`."""
    sparsity = sparsity_of(layout)
    of_heads = block_rows(layout, heads, length)
    kinds: dict[tuple[_Tile, ...], int] = {}
    alike: dict[tuple[tuple[int, ...], ...], int] = {}  # (block layouts are compared before their tiles are made)
    kind_of: list[int] = []
    for head, rows in enumerate(of_heads):
        if sparsity.of_positions or rows not in alike:
            tiles = tuple(_tiles_of_head(sparsity, head, rows, length, is_causal, side, patterns))
            alike[rows] = kinds.setdefault(tiles, len(kinds))
        kind_of.append(alike[rows])
    return list(kinds), kind_of if len(kind_of) == heads else kind_of * heads


def _tiles_of_head(
    sparsity: Sparsity,
    head: int,
    rows: Sequence[tuple[int, ...]],
    length: int,
    is_causal: bool,
    side: int,
    patterns: dict[bytes, int],
) -> list[_Tile]:
    """Return the tiles of a head that show something; patterns that are new are added to `patterns`."""
    tiles: list[_Tile] = []
    block, within = sparsity.block, torch.arange(side)
    for row in range(-(-length // side)):
        chosen = rows[row * side // block : -(-(row + 1) * side // block)]
        columns = _columns(chosen, block, side, row if is_causal else -(-length // side) - 1)
        if not columns:
            continue
        keys = (torch.tensor(columns).unsqueeze(1) * side + within).flatten()
        # (Queries behind the end stand for the last one: nothing is stored for them.)
        queries = (row * side + within).clamp(max=length - 1)
        shown = _shown(sparsity, head, chosen, queries, keys.clamp(max=length - 1)) & (keys < length)
        if is_causal:
            shown &= keys <= queries.unsqueeze(1)
        squares = shown.view(side, len(columns), side).transpose(0, 1)
        some, whole = squares.flatten(1).any(1).tolist(), squares.flatten(1).all(1).tolist()
        for at, column in enumerate(columns):
            if whole[at]:
                tiles.append((row, column, WHOLE))
            elif some[at]:
                tiles.append((row, column, patterns.setdefault(_packed(squares[at]), len(patterns))))
    return tiles


def _columns(rows: Sequence[tuple[int, ...]], block: int, side: int, last: int) -> list[int]:
    """Return the columns of tiles, up to the last, in which a block of these rows is."""
    blocks = {at for row in rows for at in row}
    if block <= side:
        return sorted(column for column in {at * block // side for at in blocks} if column <= last)
    each = block // side
    return sorted(column for at in blocks for column in range(at * each, (at + 1) * each) if column <= last)


def _shown(sparsity: Sparsity, head: int, rows: Sequence[tuple[int, ...]], queries: Tensor, keys: Tensor) -> Tensor:
    """Return what a layout shows of these positions; `rows` are the blocks that the queries' rows of blocks see, from the first query's on."""
    if sparsity.of_positions:
        return shown_by(sparsity, torch.tensor([head]), queries, keys)[0].contiguous()
    blocks = torch.zeros((len(rows), int(keys[-1]) // sparsity.block + 1), dtype=torch.bool)
    for at, row in enumerate(rows):
        blocks[at, [column for column in row if column < blocks.shape[1]]] = True
    first = int(queries[0]) // sparsity.block
    return blocks[(queries // sparsity.block - first).unsqueeze(1), keys // sparsity.block]


def _packed(square: Tensor) -> bytes:
    powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
    bits: Tensor = (square.reshape(-1, 8).to(torch.uint8) * powers).sum(-1, dtype=torch.uint8)
    return bits.numpy().tobytes()


def _lists(kinds: Sequence[Sequence[_Tile]], own: int, count: int, device: torch.device) -> Lists:
    """Return the lists by row (`own` 0) or by column (`own` 1)."""
    bounds: list[list[tuple[int, int, int]]] = []
    others: list[int] = []
    patterns: list[int] = []
    for kind in kinds:
        lists: list[list[tuple[bool, int, int]]] = [[] for _ in range(count)]
        for tile in kind:
            lists[tile[own]].append((tile[2] == WHOLE, tile[1 - own], tile[2]))
        bounds.append([])
        for one in lists:
            begin, parts = len(others), sum(not whole for whole, _, _ in one)
            for _, other, pattern in sorted(one):
                others.append(other)
                patterns.append(pattern)
            bounds[-1].append((begin, begin + parts, len(others)))
    return Lists(_on(device, bounds), _on(device, others or [0]), _on(device, patterns or [WHOLE]))


def _on(device: torch.device, numbers: Sequence[object]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32).to(device)

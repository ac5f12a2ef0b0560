"""Which blocks of queries attention computes with which blocks of keys, as records: `Plan(attention={"layers.*": zgraph.BigBird()})`.

Names, defaults and layouts are those of DeepSpeed's sparse attention (0.19.6). Nothing here imports torch. A layout is a square of blocks of
`block` x `block` elements: rows are blocks of queries, columns blocks of keys. What lies outside of the layout is not computed; inside of it
the model's own mask holds. A sequence whose length the block does not divide ends in a shorter block.

Sources: Child et al. 2019, "Generating Long Sequences with Sparse Transformers" (`Fixed`, `Variable`); Zaheer et al. 2020, "Big Bird"
(`BigBird`); Beltagy et al. 2020, "Longformer" (`Longformer`, `LocalWindow`).
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, Union

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, StrictInt, model_validator

from zgraph.errors import PlanError
from zgraph.names import did_you_mean, matches
from zgraph.record import Record, Table, short

__all__ = [
    "AnySparsity",
    "Attention",
    "AttentionTable",
    "BigBird",
    "BlockLayout",
    "Dense",
    "Fixed",
    "LocalWindow",
    "Longformer",
    "MaskFunction",
    "SlidingWindow",
    "Sparsity",
    "Variable",
    "pattern_of",
    "sparsity_of",
]

Count = Annotated[StrictInt, Field(ge=1)]
Index = Annotated[StrictInt, Field(ge=0)]
Direction = Annotated[
    Literal["unidirectional", "bidirectional"],
    Field(description="unidirectional: no block of queries sees a later block of keys"),
]
Window = Annotated[Count, Field(description="blocks of keys around each block of queries, which is in the middle")]
RandomBlocks = Annotated[StrictInt, Field(ge=0, description="blocks of keys by chance for each block of queries")]
Seed = Annotated[
    StrictInt, Field(ge=0, description="of the random blocks, which are the same in each step and on each rank")
]
GlobalStarts = Annotated[
    tuple[Index, ...],
    Field(description="the blocks that all see (with global_block_end_indices: where each range begins)"),
]
GlobalEnds = Annotated[tuple[Index, ...] | None, Field(description="where each range of global blocks ends, exclusive")]

Rows = list[set[int]]
"""For each block of queries the blocks of keys that it sees."""


class Sparsity(Record, frozen=True):
    """The fields that all sparsities have."""

    kind: str
    block: StrictInt = Field(default=16, description="the side of a block, a power of two of at least 8")

    @model_validator(mode="after")
    def _check_block(self) -> Self:
        if self.block < 8 or self.block & (self.block - 1):
            raise PlanError(
                f"a block can't be of {self.block} x {self.block} elements",
                where="block",
                hint="16, 32, 64, 128, …: a power of two",
            )
        return self

    def __str__(self) -> str:
        return repr(self)

    @property
    def heads_differ(self) -> bool:
        """Whether heads may have different layouts."""
        return False

    @property
    def of_positions(self) -> bool:
        """Whether it says which positions of keys a query sees, so that some blocks are seen in part."""
        return False

    def rows(self, blocks: int, head: int) -> Rows:
        """Return the layout of one head for a sequence of this number of blocks."""
        raise NotImplementedError

    def is_partial(self, row: int, block: int) -> bool:
        """Return whether some query of a row of blocks may not see some key of a block that the row sees."""
        return self.of_positions


class _OfHeads(Sparsity, frozen=True):
    different_layout_per_head: StrictBool = Field(
        default=False, description="whether each head has a layout of its own"
    )

    @property
    def heads_differ(self) -> bool:
        return self.different_layout_per_head


class Dense(_OfHeads, frozen=True):
    """All blocks: attention as it is, for comparison."""

    kind: Literal["dense"] = "dense"

    def rows(self, blocks: int, head: int) -> Rows:
        return [set(range(blocks)) for _ in range(blocks)]


class Fixed(_OfHeads, frozen=True):
    """Windows side by side, and in each of them representative blocks that all later (or all) blocks see."""

    kind: Literal["fixed"] = "fixed"
    num_local_blocks: Count = Field(default=4, description="blocks in a window")
    num_global_blocks: Count = Field(default=1, description="blocks of a window that represent it, at its end")
    attention: Direction = "bidirectional"
    horizontal_global_attention: StrictBool = Field(
        default=False, description="whether representative blocks also see all blocks (bidirectional only)"
    )
    num_different_global_patterns: Count = Field(
        default=1, description="how many different representatives windows have, head by head"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        local, representatives = self.num_local_blocks, self.num_global_blocks
        if local % representatives:
            what = f"a window of {local} blocks can't be represented by parts of {representatives} blocks"
            raise PlanError(what, where="num_global_blocks", hint="num_global_blocks divides num_local_blocks")
        _refuse_horizontal(self.attention, self.horizontal_global_attention)
        patterns = self.num_different_global_patterns
        if patterns > 1 and not self.different_layout_per_head:
            what = f"num_different_global_patterns is {patterns}, and all heads have one layout"
            raise PlanError(
                what, where="num_different_global_patterns", hint="different_layout_per_head=True; or leave it out"
            )
        if patterns > local // representatives:
            what = f"a window of {local} blocks has no {patterns} different parts of {representatives} blocks"
            raise PlanError(what, where="num_different_global_patterns", hint=f"at most {local // representatives}")
        return self

    def rows(self, blocks: int, head: int) -> Rows:
        local, represent = self.num_local_blocks, self.num_global_blocks
        one_way = self.attention == "unidirectional"
        rows = _windows(blocks, [local], one_way=one_way)
        first = local - (1 + head % self.num_different_global_patterns) * represent
        whole = blocks - blocks % local
        parts = [range(start, min(start + represent, blocks)) for start in range(first, whole, local)]
        if whole < blocks:  # (a window that is cut short has its last blocks as representatives at the latest)
            start = min(whole + first, blocks - represent)
            # In fewer blocks than represent a window DeepSpeed counts the first of them from behind.
            parts.append(range(start if start >= 0 else max(0, blocks + start), min(start + represent, blocks)))
        for part in parts:
            _see(rows, part, one_way=one_way, across=self.horizontal_global_attention)
        return rows


class Variable(_OfHeads, frozen=True):
    """Windows of several sizes, global blocks by their indices, and random blocks."""

    kind: Literal["variable"] = "variable"
    num_random_blocks: RandomBlocks = 0
    local_window_blocks: tuple[Count, ...] = Field(
        default=(4,), min_length=1, description="blocks in each window; the last number is for all that follow"
    )
    global_block_indices: GlobalStarts = (0,)
    global_block_end_indices: GlobalEnds = None
    attention: Direction = "bidirectional"
    horizontal_global_attention: StrictBool = Field(
        default=False, description="whether global blocks also see all blocks (bidirectional only)"
    )
    seed: Seed = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        _refuse_horizontal(self.attention, self.horizontal_global_attention)
        _check_ranges(self.global_block_indices, self.global_block_end_indices)
        return self

    def rows(self, blocks: int, head: int) -> Rows:
        one_way = self.attention == "unidirectional"
        rows = _windows(blocks, self.local_window_blocks, one_way=one_way)
        for row, chosen in zip(
            rows, _chosen(self.seed, head, blocks, self.num_random_blocks, one_way=False), strict=True
        ):
            row |= chosen
        for part in _ranges(self.global_block_indices, self.global_block_end_indices, blocks):
            _see(rows, part, one_way=one_way, across=self.horizontal_global_attention)
        return rows


class BigBird(_OfHeads, frozen=True):
    """A sliding window, global blocks at the beginning, and random blocks."""

    kind: Literal["bigbird"] = "bigbird"
    num_random_blocks: RandomBlocks = 1
    num_sliding_window_blocks: Window = 3
    num_global_blocks: Annotated[StrictInt, Field(ge=0, description="global blocks, at the beginning")] = 1
    attention: Direction = "bidirectional"
    seed: Seed = 0

    def rows(self, blocks: int, head: int) -> Rows:
        one_way = self.attention == "unidirectional"
        rows = _sliding(blocks, self.num_sliding_window_blocks)
        for row, chosen in zip(
            rows, _chosen(self.seed, head, blocks, self.num_random_blocks, one_way=one_way), strict=True
        ):
            row |= chosen
        _see(rows, range(min(self.num_global_blocks, blocks)), one_way=False, across=True)
        return _without_later(rows) if one_way else rows


class Longformer(_OfHeads, frozen=True):
    """A sliding window, and global blocks by their indices (DeepSpeed's `bslongformer`)."""

    kind: Literal["longformer"] = "longformer"
    num_sliding_window_blocks: Window = 3
    global_block_indices: GlobalStarts = (0,)
    global_block_end_indices: GlobalEnds = None
    attention: Direction = "bidirectional"

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_ranges(self.global_block_indices, self.global_block_end_indices)
        return self

    def rows(self, blocks: int, head: int) -> Rows:
        rows = _sliding(blocks, self.num_sliding_window_blocks)
        for part in _ranges(self.global_block_indices, self.global_block_end_indices, blocks):
            _see(rows, part, one_way=False, across=True)
        return _without_later(rows) if self.attention == "unidirectional" else rows


class LocalWindow(Sparsity, frozen=True):
    """A sliding window alone."""

    kind: Literal["local_window"] = "local_window"
    num_sliding_window_blocks: Window = 3
    attention: Direction = "unidirectional"

    def rows(self, blocks: int, head: int) -> Rows:
        rows = _sliding(blocks, self.num_sliding_window_blocks)
        return _without_later(rows) if self.attention == "unidirectional" else rows


class SlidingWindow(Sparsity, frozen=True):
    """A window of positions: a query sees itself, the `window` - 1 keys before it, and the `ahead` keys behind it.

    It is that of Mistral and Gemma, position by position; `LocalWindow` is one of whole blocks.
    """

    kind: Literal["sliding_window"] = "sliding_window"
    window: Count = Field(description="keys up to the query's own, which counts")
    ahead: Annotated[StrictInt, Field(ge=0, description="keys behind the query's own")] = 0
    block: StrictInt = Field(default=64, description="the side of a block, a power of two of at least 8")

    @property
    def of_positions(self) -> bool:
        return True

    def rows(self, blocks: int, head: int) -> Rows:
        side = self.block
        firsts = (max(0, row * side - self.window + 1) // side for row in range(blocks))
        lasts = (min(blocks - 1, ((row + 1) * side - 1 + self.ahead) // side) for row in range(blocks))
        return [set(range(first, last + 1)) for first, last in zip(firsts, lasts, strict=True)]

    def is_partial(self, row: int, block: int) -> bool:
        farthest_before = (row - block + 1) * self.block - 1
        farthest_behind = (block - row + 1) * self.block - 1
        return farthest_before >= self.window or farthest_behind > self.ahead


class BlockLayout(Sparsity, frozen=True):
    """A layout of one's own: for one head, or for each, a square of blocks, as booleans, 0 and 1, or texts like "0110".

    A shorter sequence takes its first rows and columns; a longer one is an error.
    """

    kind: Literal["layout"] = "layout"
    layout: Annotated[tuple[tuple[str, ...], ...], BeforeValidator(lambda value: _squares(value))] = Field(
        description="for one head, or for each, rows of blocks"
    )

    @property
    def heads_differ(self) -> bool:
        return len(self.layout) > 1

    def rows(self, blocks: int, head: int) -> Rows:
        square = self.layout[head % len(self.layout)]
        if blocks > len(square):
            raise PlanError(
                f"the layout has {len(square)} x {len(square)} blocks, and a sequence has {blocks}",
                where="attention",
                hint="give the layout of the longest sequence; shorter ones take its first rows and columns",
            )
        return [{at for at, shown in enumerate(square[row][:blocks]) if shown == "1"} for row in range(blocks)]


class MaskFunction(Sparsity, frozen=True):
    """A function `mask_mod(batch, head, query, key)` of positions, as flex attention takes it, that is true where a query sees a key.

    It is called with tensors of whole numbers that broadcast, and gives a tensor of booleans. It may not depend on the batch. Blocks that it
    leaves empty are not computed. Layouts are computed once for each length: numbers outside of it that it reads are compared at each call.
    """

    kind: Literal["function"] = "function"
    function: str = Field(pattern=r"^[\w.]+:[\w.]+$", description='"package.module:name"')
    block: StrictInt = Field(default=128, description="the side of a block, a power of two of at least 8")
    code: str = Field(default="", description="a digest of the function's code, which zgraph fills in")

    @property
    def heads_differ(self) -> bool:
        return True  # (nobody knows before it is called)

    @property
    def of_positions(self) -> bool:
        return True


class PartOfHeads(Sparsity, frozen=True):
    """The layouts of some heads one after another, of a sparsity whose heads differ: those that a rank computes. No plan has it."""

    kind: Literal["part_of_heads"] = "part_of_heads"
    whole: str = Field(description="the sparsity, as JSON")
    first: Index = Field(description="the first of the heads")
    heads: Count = Field(description="how many heads there are in all")

    @property
    def sparsity(self) -> Sparsity:
        return sparsity_of(self.whole)

    @property
    def heads_differ(self) -> bool:
        return True

    @property
    def of_positions(self) -> bool:
        return self.sparsity.of_positions

    def rows(self, blocks: int, head: int) -> Rows:
        return self.sparsity.rows(blocks, self.first + head)

    def is_partial(self, row: int, block: int) -> bool:
        return self.sparsity.is_partial(row, block)


# -- parts of layouts -------------------------------------------------------------------------------------------------
def _windows(blocks: int, sizes: Sequence[int], *, one_way: bool) -> Rows:
    """Return windows side by side, whose rows see the window, or with `one_way` only its blocks up to themselves."""
    rows: Rows = []
    start = 0
    for at in range(blocks):
        size = sizes[min(at, len(sizes) - 1)]
        end = min(start + size, blocks)
        rows += [set(range(start, row + 1 if one_way else end)) for row in range(start, end)]
        start = end
    return rows


def _sliding(blocks: int, window: int) -> Rows:
    reach = window // 2
    return [set(range(max(0, row - reach), min(row + reach + 1, blocks))) for row in range(blocks)]


def _see(rows: Rows, columns: range, *, one_way: bool, across: bool) -> None:
    """Let all rows see these columns, with `one_way` only rows from the first of them on; with `across` the rows of these
    blocks see all."""
    if not columns:
        return
    for row in rows[columns.start if one_way else 0 :]:
        row |= set(columns)
    if across:
        for at in columns:
            rows[at] = set(range(len(rows)))


def _without_later(rows: Rows) -> Rows:
    return [{column for column in row if column <= at} for at, row in enumerate(rows)]


def _chosen(seed: int, head: int, blocks: int, count: int, *, one_way: bool) -> Iterator[set[int]]:
    """Yield random columns for each row, with `one_way` none behind it."""
    numbers = random.Random(f"{seed} {head}")
    for row in range(blocks):
        columns = range(row + 1 if one_way else blocks)
        yield set(numbers.sample(columns, min(count, len(columns))))


def _ranges(starts: tuple[int, ...], ends: tuple[int, ...] | None, blocks: int) -> Iterator[range]:
    for start, end in zip(starts, ends or [start + 1 for start in starts], strict=True):
        yield range(start, min(end, blocks))


def _check_ranges(starts: tuple[int, ...], ends: tuple[int, ...] | None) -> None:
    if ends is None:
        return
    if len(starts) != len(ends):
        what = f"there are {len(starts)} beginnings of global blocks, and {len(ends)} ends"
        raise PlanError(what, where="global_block_end_indices", hint="as many as global_block_indices")
    for start, end in zip(starts, ends, strict=True):
        if start >= end:
            what = f"global blocks can't begin at {start} and end before {end}"
            raise PlanError(
                what, where="global_block_end_indices", hint="an end is behind its beginning: it does not count itself"
            )


def _refuse_horizontal(attention: str, across: bool) -> None:
    if across and attention != "bidirectional":
        raise PlanError(
            "global blocks are to see all blocks, and no block may see a later one",
            where="horizontal_global_attention",
            hint='attention="bidirectional"; or leave it out',
        )


def _squares(value: Any) -> Any:
    """Return a layout, given as a tensor, lists or texts, as a square of texts for each head, or for all in one."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple) or not value:
        raise PlanError(
            f"a layout can't be {short(value)}", where="layout", hint="a square of booleans, or one for each head"
        )
    one_head = isinstance(value[0], str) or (
        isinstance(value[0], list | tuple) and not isinstance(value[0][0], list | tuple | str)
    )
    squares = tuple(tuple(_row(row) for row in square) for square in ([value] if one_head else value))
    if any(len(square) != len(squares[0]) or any(len(row) != len(square) for row in square) for square in squares):
        raise PlanError(
            "a layout is no square of blocks, or heads differ in its size",
            where="layout",
            hint="as many rows as columns",
        )
    return squares


def _row(row: Any) -> str:
    text = row if isinstance(row, str) else "".join(str(int(shown)) for shown in row)
    if set(text) - {"0", "1"}:
        raise PlanError(
            f"a row of a layout can't be {short(row)}", where="layout", hint='booleans, 0 and 1, or a text like "0110"'
        )
    return text


# -- the plan's field -------------------------------------------------------------------------------------------------
_KINDS: dict[str, type[Sparsity]] = {
    str(record.model_fields["kind"].default): record
    for record in (Dense, Fixed, Variable, BigBird, Longformer, LocalWindow, SlidingWindow, BlockLayout, MaskFunction)
}


def _known(value: Any) -> Any:
    """Return a record as it is, a function's name as its record, and a table as the record that its kind says."""
    if isinstance(value, str) and ":" in value:
        return MaskFunction(function=value)
    if not isinstance(value, Mapping):
        if isinstance(value, Sparsity):
            return value
        raise PlanError(
            f"{short(value)} is no sparsity of attention",
            hint='zgraph.BigBird(), say, or a mask function "package.module:name"',
        )
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        what = "a sparsity needs a kind" if kind is None else f"there is no sparsity {short(kind)}"
        raise PlanError(what, where="kind", hint=did_you_mean(str(kind or ""), _KINDS))
    return _KINDS[kind].model_validate(value)


AnySparsity = Annotated[
    Union[  # noqa: UP007 (pydantic needs a union at run time)
        Dense, Fixed, Variable, BigBird, Longformer, LocalWindow, SlidingWindow, BlockLayout, MaskFunction
    ],
    Field(discriminator="kind"),
    BeforeValidator(_known),
]


class Attention(Table[AnySparsity]):
    """The sparsity of attention, by pattern of module paths; the first pattern that matches counts."""

    _field = "attention"


def pattern_of(attention: Mapping[str, object], paths: Sequence[str]) -> str | None:
    """Return the first pattern that matches a module by the paths of it and of the modules around it, of which the whole model has none;
    None if no pattern does."""
    return next((pattern for pattern in attention if matches(paths or [""], [pattern])), None)


AttentionTable = Annotated[dict[str, AnySparsity], AfterValidator(Attention)]


@functools.lru_cache(maxsize=256)  # (operators ask at each call)
def sparsity_of(text: str) -> Sparsity:
    """Return the sparsity that `model_dump_json` has written as `text`."""
    kind = json.loads(text)["kind"]
    return (PartOfHeads if kind == "part_of_heads" else _KINDS[kind]).model_validate_json(text)

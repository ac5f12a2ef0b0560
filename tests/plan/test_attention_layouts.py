"""Layouts of sparse attention: each block by the rules that DeepSpeed documents (0.19.6), written here as conditions on a block's row and column."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import zgraph
from zgraph.errors import PlanError
from zgraph.plan.attention import sparsity_of


def layout(sparsity, blocks: int, head: int = 0) -> list[list[bool]]:
    rows = sparsity.rows(blocks, head)
    assert len(rows) == blocks and all(row <= set(range(blocks)) for row in rows)
    return [[column in row for column in range(blocks)] for row in rows]


def by_rule(blocks: int, shown) -> list[list[bool]]:
    return [[bool(shown(row, column)) for column in range(blocks)] for row in range(blocks)]


def fixed(s, blocks: int, head: int):
    """Windows of `num_local_blocks`; of each the `num_global_blocks` at its end (for the n-th pattern, n times as far from it) are global. In a
    last window that is cut short they are at the same place if that is there, else the last blocks."""
    one_way = s.attention == "unidirectional"
    first = s.num_local_blocks - (1 + head % s.num_different_global_patterns) * s.num_global_blocks
    start_of: dict[int, int] = {}
    for block in range(blocks):
        window = block // s.num_local_blocks * s.num_local_blocks
        whole = window + s.num_local_blocks <= blocks
        start = window + first if whole else min(window + first, blocks - s.num_global_blocks)
        begins = start if start >= 0 else max(0, blocks + start)  # (DeepSpeed's slices count from behind there)
        for at in range(begins, min(start + s.num_global_blocks, blocks)):
            start_of[at] = min(begins, start_of.get(at, begins))

    def shown(row: int, column: int) -> bool:
        local = row // s.num_local_blocks == column // s.num_local_blocks and (column <= row or not one_way)
        to_global = column in start_of and (not one_way or row >= start_of[column])
        return local or to_global or (s.horizontal_global_attention and row in start_of)

    return by_rule(blocks, shown)


@pytest.mark.parametrize("seed", range(12))
def test_fixed_layouts(seed):
    draw = random.Random(seed)
    for _ in range(10):
        represent = draw.choice([1, 1, 2, 3])
        local = represent * draw.randint(1, 4)
        per_head, one_way = draw.random() < 0.5, draw.random() < 0.5
        s = zgraph.Fixed(
            block=draw.choice([8, 16, 64]),
            num_local_blocks=local,
            num_global_blocks=represent,
            attention="unidirectional" if one_way else "bidirectional",
            horizontal_global_attention=not one_way and draw.random() < 0.5,
            different_layout_per_head=per_head,
            num_different_global_patterns=draw.randint(1, local // represent) if per_head else 1,
        )
        for blocks, head in ((draw.randint(1, 4), 0), (draw.randint(3, 20), draw.randint(0, 5))):
            assert layout(s, blocks, head) == fixed(s, blocks, head), s


def in_ranges(s, block: int) -> bool:
    ends = s.global_block_end_indices or [start + 1 for start in s.global_block_indices]
    return any(start <= block < end for start, end in zip(s.global_block_indices, ends, strict=True))


def window_of(s, block: int) -> int:
    """Return the number of a block's window, where sizes go on with the last one."""
    end = 0
    for number in itertools.count():
        end += s.local_window_blocks[min(number, len(s.local_window_blocks) - 1)]
        if block < end:
            return number


def drawn_globals(draw: random.Random) -> dict:
    starts = sorted(draw.sample(range(12), draw.randint(0, 3)))
    return {
        "global_block_indices": tuple(starts),
        "global_block_end_indices": tuple(s + draw.randint(1, 3) for s in starts) if draw.random() < 0.5 else None,
    }


@pytest.mark.parametrize("seed", range(8))
def test_variable_layouts(seed):
    draw = random.Random(seed)
    for _ in range(10):
        one_way = draw.random() < 0.5
        s = zgraph.Variable(
            local_window_blocks=tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 3))),
            attention="unidirectional" if one_way else "bidirectional",
            horizontal_global_attention=not one_way and draw.random() < 0.5,
            **drawn_globals(draw),
        )
        ends = s.global_block_end_indices or [start + 1 for start in s.global_block_indices]

        def shown(row: int, column: int, s=s, one_way=one_way, ends=ends) -> bool:
            ranges = zip(s.global_block_indices, ends, strict=True)
            to_global = any(a <= column < b and (not one_way or row >= a) for a, b in ranges)
            local = window_of(s, row) == window_of(s, column) and (column <= row or not one_way)
            return local or to_global or (s.horizontal_global_attention and in_ranges(s, row))

        blocks = draw.randint(1, 20)
        assert layout(s, blocks) == by_rule(blocks, shown), s


@pytest.mark.parametrize("seed", range(8))
def test_layouts_with_sliding_windows(seed):
    draw = random.Random(seed)
    for _ in range(10):
        one_way, window, blocks = draw.random() < 0.5, draw.randint(1, 7), draw.randint(1, 20)
        attention = "unidirectional" if one_way else "bidirectional"
        front = draw.randint(0, 3)

        def near(row: int, column: int, one_way=one_way, window=window) -> bool:
            return abs(row - column) <= window // 2 and (column <= row or not one_way)

        local = zgraph.LocalWindow(num_sliding_window_blocks=window, attention=attention)
        assert layout(local, blocks) == by_rule(blocks, near)
        longformer = zgraph.Longformer(num_sliding_window_blocks=window, attention=attention, **drawn_globals(draw))

        def shown(row, column, near=near, s=longformer, one_way=one_way):
            return near(row, column) or ((in_ranges(s, row) or in_ranges(s, column)) and (column <= row or not one_way))

        assert layout(longformer, blocks) == by_rule(blocks, shown)
        bigbird = zgraph.BigBird(
            num_random_blocks=0, num_sliding_window_blocks=window, num_global_blocks=front, attention=attention
        )

        def by_front(row, column, near=near, front=front, one_way=one_way):
            return near(row, column) or ((row < front or column < front) and (column <= row or not one_way))

        assert layout(bigbird, blocks) == by_rule(blocks, by_front)


@pytest.mark.parametrize("attention", ["unidirectional", "bidirectional"])
@pytest.mark.parametrize("kind", [zgraph.BigBird, zgraph.Variable])
def test_random_blocks_are_added_to_each_row_and_are_the_same_every_time(kind, attention):
    given = {"attention": attention, "different_layout_per_head": True}
    without, with_random = (kind(num_random_blocks=count, **given) for count in (0, 2))
    other_seed = kind(num_random_blocks=2, seed=1, **given)
    plain, first, again, other_head, other = (
        layout(s, 30, head)
        for s, head in ((without, 0), (with_random, 0), (with_random, 0), (with_random, 1), (other_seed, 0))
    )
    assert first == again and first != other_head and first != other
    one_way = attention == "unidirectional" and kind is zgraph.BigBird  # (DeepSpeed's Variable draws from all columns)
    for at, (row, base) in enumerate(zip(first, plain, strict=True)):
        more = [column for column in range(30) if row[column] and not base[column]]
        assert all(row[column] or not base[column] for column in range(30)) and len(more) <= 2
        assert not one_way or all(column <= at for column in more)
    assert sum(map(sum, first)) > sum(map(sum, plain)) + 10


def test_heads_have_one_layout_unless_they_are_told_otherwise():
    assert not zgraph.BigBird().heads_differ and zgraph.BigBird(different_layout_per_head=True).heads_differ
    patterns = zgraph.Fixed(different_layout_per_head=True, num_different_global_patterns=4)
    assert len({str(layout(patterns, 8, head)) for head in range(8)}) == 4


def test_a_layout_of_ones_own_is_read_in_every_form():
    square = [[1, 0], [1, 1]]
    forms = [square, torch.tensor(square), torch.tensor(square).bool(), ["10", "11"], [[True, False], [True, True]]]
    assert len({zgraph.BlockLayout(layout=form) for form in forms}) == 1
    both = zgraph.BlockLayout(layout=torch.tensor([square, [[1, 1], [0, 1]]]))
    assert layout(both, 2, 0) == [[True, False], [True, True]] and layout(both, 2, 1) == [[True, True], [False, True]]
    assert layout(both, 1, 1) == [[True]]


EVERY = [
    zgraph.Dense(),
    zgraph.Fixed(block=64, num_local_blocks=8),
    zgraph.Variable(num_random_blocks=3, local_window_blocks=(2, 5)),
    zgraph.BigBird(seed=4),
    zgraph.Longformer(global_block_indices=(0, 7), global_block_end_indices=(1, 9)),
    zgraph.LocalWindow(num_sliding_window_blocks=5),
    zgraph.SlidingWindow(window=100, ahead=3),
    zgraph.BlockLayout(layout=["10", "11"]),
    zgraph.MaskFunction(function="a.b:c"),
]


@pytest.mark.parametrize("sparsity", EVERY, ids=lambda s: s.kind)
def test_a_sparsity_goes_through_plan_files_and_operators(sparsity):
    plan = zgraph.Plan(attention={"layers.*": sparsity})
    assert zgraph.Plan.model_validate_json(plan.model_dump_json()) == plan
    assert hash(plan) == hash(zgraph.Plan(attention={"layers.*": sparsity.model_dump()}))
    assert sparsity_of(sparsity.model_dump_json()) == sparsity
    assert type(sparsity).__name__ in str(plan)


def test_a_function_may_be_given_by_its_name_alone():
    assert zgraph.Plan(attention={"*": "a.b:c"}).attention["*"] == zgraph.MaskFunction(function="a.b:c")


WRONG = [
    (lambda: zgraph.Fixed(block=24), "a block can't be of 24 x 24 elements"),
    (lambda: zgraph.Fixed(block=4), "a block can't be of 4 x 4 elements"),
    (lambda: zgraph.Fixed(num_global_blocks=3), "a window of 4 blocks can't be represented by parts of 3"),
    (
        lambda: zgraph.Fixed(attention="unidirectional", horizontal_global_attention=True),
        "no block may see a later one",
    ),
    (lambda: zgraph.Fixed(num_different_global_patterns=2), "all heads have one layout"),
    (lambda: zgraph.Fixed(num_different_global_patterns=5, different_layout_per_head=True), "no 5 different parts"),
    (lambda: zgraph.Fixed(num_local=3), "did you mean 'num_local_blocks'"),
    (
        lambda: zgraph.Variable(attention="unidirectional", horizontal_global_attention=True),
        "no block may see a later one",
    ),
    (lambda: zgraph.Variable(local_window_blocks=()), "local_window_blocks"),
    (lambda: zgraph.Variable(global_block_indices=(0, 2), global_block_end_indices=(1,)), "2 beginnings"),
    (
        lambda: zgraph.Longformer(global_block_indices=(2,), global_block_end_indices=(2,)),
        "begin at 2 and end before 2",
    ),
    (lambda: zgraph.LocalWindow(num_sliding_window_blocks=0), "num_sliding_window_blocks"),
    (lambda: zgraph.BlockLayout(layout=[]), "a layout can't be []"),
    (lambda: zgraph.BlockLayout(layout=["10", "1"]), "no square"),
    (lambda: zgraph.BlockLayout(layout=["12", "11"]), "a row of a layout can't be '12'"),
    (lambda: zgraph.MaskFunction(function="mask"), "function"),
    (lambda: zgraph.Plan(attention={"*": {"block": 16}}), "a sparsity needs a kind"),
    (lambda: zgraph.Plan(attention={"*": {"kind": "bigbrd"}}), "did you mean 'bigbird'"),
    (lambda: zgraph.Plan(attention={"*": "window"}), "'window' is no sparsity of attention"),
    (
        lambda: zgraph.Plan(attention={"*": zgraph.Fixed(different_layout_per_head=True)}, mesh={"tp": 2, "cp": 2}),
        "both mesh.tp and mesh.cp divide the heads",
    ),
]


@pytest.mark.parametrize(("make", "said"), WRONG, ids=[said for _, said in WRONG])
def test_wrong_sparsities_are_refused(make, said):
    with pytest.raises(PlanError) as caught:
        make()
    assert said in str(caught.value)

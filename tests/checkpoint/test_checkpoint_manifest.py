"""What a manifest may say: blocks that are all of their tensors, counts that a run can have, and groups of plain values."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from zgraph.checkpoint import manifest
from zgraph.checkpoint.manifest import MOST_COUNTED, MOST_CUT, Manifest, check_tiling
from zgraph.checkpoint.source import Block, TensorInfo
from zgraph.errors import CheckpointError
from zgraph.update.resume import Known


def tiles(blocks: list[Block], shape: tuple[int, ...]) -> bool:
    try:
        check_tiling({"it": TensorInfo(torch.float32, shape, tuple(blocks))})
    except CheckpointError:
        return False
    return True


def covers_each_once(blocks: list[Block], shape: tuple[int, ...]) -> bool:
    """By counting every element."""
    counts = dict.fromkeys(itertools.product(*map(range, shape)), 0)
    for block in blocks:
        if any(o + n > d for o, n, d in zip(block.offsets, block.sizes, shape, strict=True)):
            return False
        for at in itertools.product(*(range(o, o + n) for o, n in zip(block.offsets, block.sizes, strict=True))):
            counts[at] += 1
    return bool(blocks) and set(counts.values()) <= {1}


@some.composite
def cut_up(draw) -> tuple[list[Block], tuple[int, ...]]:
    """A box cut again and again, in any order of its blocks, and perhaps with one of them changed."""
    shape = tuple(draw(some.lists(some.integers(0, 4), max_size=4)))
    blocks = [Block((0,) * len(shape), shape)]
    for _ in range(draw(some.integers(0, 6))):
        block = blocks.pop(draw(some.integers(0, len(blocks) - 1)))
        if not shape:
            blocks.append(block)
            break
        d = draw(some.integers(0, len(shape) - 1))
        at = draw(some.integers(0, block.sizes[d]))
        offsets, sizes, rest = list(block.offsets), list(block.sizes), list(block.sizes)
        offsets[d] += at
        sizes[d], rest[d] = at, block.sizes[d] - at
        blocks += [Block(block.offsets, tuple(sizes)), Block(tuple(offsets), tuple(rest))]
    blocks = draw(some.permutations(blocks))
    change = draw(some.sampled_from(["none", "none", "drop", "double", "move", "grow"]))
    if change == "drop":
        blocks = blocks[1:]
    elif change == "double":
        blocks = [*blocks, blocks[0]]
    elif shape and change in ("move", "grow"):
        d, one = draw(some.integers(0, len(shape) - 1)), blocks[0]
        moved = tuple(n + (i == d) for i, n in enumerate(one.offsets if change == "move" else one.sizes))
        blocks[0] = Block(moved, one.sizes) if change == "move" else Block(one.offsets, moved)
    return blocks, shape


@given(cut_up())
def test_blocks_are_all_of_a_tensor_where_each_element_is_in_one(case):
    blocks, shape = case
    assert tiles(blocks, shape) == covers_each_once(blocks, shape)


BOXES = some.tuples(some.integers(0, 2), some.integers(0, 2), some.integers(0, 3), some.integers(0, 3))


@given(some.lists(BOXES, max_size=6))
def test_no_blocks_that_are_anywhere_are_taken_for_a_tensor(boxes):
    blocks = [Block(box[:2], box[2:]) for box in boxes]
    assert tiles(blocks, (3, 3)) == covers_each_once(blocks, (3, 3))


def test_a_pinwheel_that_no_cut_goes_through_is_known():
    wheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    blocks = [Block(*b) for b in wheel]
    assert tiles(blocks, (3, 3)) and not tiles(blocks[:-1], (3, 3))
    assert not tiles([*blocks[:-1], Block((0, 0), (1, 1))], (3, 3))


@pytest.mark.parametrize("sides", [(1, 512), (512, 1), (24, 24), (8, 8, 8)])
def test_blocks_of_a_grid_are_looked_at_a_few_times_each(sides, monkeypatch):
    looked = 0

    class Counted(manifest.Counter):
        def __setitem__(self, key, value):
            nonlocal looked
            looked += 1
            super().__setitem__(key, value)

    monkeypatch.setattr(manifest, "Counter", Counted)
    blocks = [Block(tuple(2 * i for i in at), (2,) * len(sides)) for at in itertools.product(*map(range, sides))]
    assert tiles(blocks, tuple(2 * n for n in sides))
    assert 0 < looked < 12 * math.prod(sides)


def test_a_tensor_that_is_cut_along_ever_more_dimensions_is_refused():
    size = MOST_CUT + 1
    blocks, left = [], Block((0,) * size, (2,) * size)
    for d in range(size):
        sizes = tuple(1 if i == d else n for i, n in enumerate(left.sizes))
        blocks.append(Block(left.offsets, sizes))
        left = Block(tuple(1 if i == d else o for i, o in enumerate(left.offsets)), sizes)
    with pytest.raises(CheckpointError, match="along 9 dimensions"):
        check_tiling({"it": TensorInfo(torch.float32, (2,) * size, (*blocks, left))})


GROUP = {"names": ["a"], "lr": 0.1, "betas": [0.9, 0.99], "fused": None, "nesterov": False, "kind": "AdamW"}


def written(folder: Path, **known) -> None:
    made = Manifest(0, {}, {}, Known(groups=[GROUP])).written()
    data = json.loads(made)
    data.pop("checksum")
    data["known"].update(known)
    body = json.dumps(data, separators=(",", ":")).encode()[:-1]
    (folder / manifest.NAME).write_bytes(body + manifest.MARK + manifest.checksum(body).encode() + b'"}\n')


def test_what_runs_have_is_read(tmp_path):
    written(tmp_path, steps=MOST_COUNTED, skipped=3, samples=12)
    assert manifest.read(tmp_path).known == Known(MOST_COUNTED, 3, 12, [GROUP])


@pytest.mark.parametrize(
    "known",
    [
        {"steps": MOST_COUNTED + 1},
        {"samples": MOST_COUNTED + 1},
        {"skipped": MOST_COUNTED + 1},
        {"steps": 3, "skipped": 4},
        {"steps": -1},
        {"groups": [{"lr": 0.1}]},
        {"groups": [{"names": "ab"}, 3]},
        {"groups": [GROUP | {"lr": {"__class__": "x"}}]},
        {"groups": [GROUP | {"betas": [0.9, {}]}]},
    ],
    ids=str,
)
def test_what_no_run_has_is_refused(known, tmp_path):
    written(tmp_path, **known)
    with pytest.raises(CheckpointError, match="damaged"):
        manifest.read(tmp_path)


def test_what_could_not_be_read_again_is_not_written():
    with pytest.raises(CheckpointError, match="can't be saved") as caught:
        Manifest(0, {}, {}, Known(groups=[GROUP | {"note": {"a": 1}}])).written()
    assert "'note' of a parameter group is a dict" in caught.value.why

"""Elements of an input that only set sizes (heights and widths of images) are symbols: one program serves all images."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sweeps import sweep
from test_lengths_gloo import whole
from torch import nn
from torch.nn import functional as F

import zgraph
from zgraph.errors import ZgraphError
from zgraph.passes.verifier import verify_program
from zgraph.program.printer import render
from zgraph.program.serialize import from_json, to_json
from zgraph.torch_compat import dynamo

TOLERANCE = 2e-6  # of a gradient over its norm: float32 rounding


class Images(nn.Module):
    """What Qwen2-VL computes of a grid: positions in blocks of two, attention within each frame, a part of the rows for each image."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, cells, grid):
        x, places = self.mix(cells), []
        for frames, high, wide in grid.tolist():
            rows, columns = torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij")
            blocks = (high // 2, 2, wide // 2, 2)
            rows, columns = (p.reshape(blocks).transpose(1, 2).flatten() for p in (rows, columns))
            places.append(torch.stack([rows, columns], -1).repeat(frames, 1))
        x = x + torch.cat(places).float().sum(-1, keepdim=True).sin()
        ends = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0]).cumsum(0, dtype=torch.int32)
        ends = F.pad(ends, (1, 0), value=0)
        pieces = torch.split(x, (ends[1:] - ends[:-1]).tolist())
        x = torch.cat([F.scaled_dot_product_attention(p[None], p[None], p[None])[0] for p in pieces])
        merged = self.out(x).view(-1, 4, 6).mean(1)
        parts = torch.split(merged, (grid.prod(-1) // 4).tolist())
        return sum(part.square().mean() for part in parts)


def call(*grids: tuple[int, int, int], dtype: torch.dtype = torch.int64) -> dict[str, torch.Tensor]:
    cells = sum(t * h * w for t, h, w in grids)
    draw = torch.Generator().manual_seed(cells)
    return {"cells": torch.randn(cells, 6, generator=draw), "grid": torch.tensor(grids, dtype=dtype)}


def pair(model: type[nn.Module] = Images, dynamic: Any = None, **plan: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = model()
    plan = {"backend": "eager", **plan}
    return zgraph.compile(copy.deepcopy(plain), zgraph.Plan(**plan), dynamic=dynamic), plain


def loss_of(out: Any) -> torch.Tensor:
    return out[0] if isinstance(out, tuple) else out


def same(mine: nn.Module, plain: nn.Module, given: dict[str, Any]) -> bool:
    """Whether losses, gradients and other outputs of a call are those of plain PyTorch."""
    outs = []
    for model in (mine, plain):
        model.zero_grad()
        outs.append(model(**{k: v.clone() for k, v in given.items()}))
        loss_of(outs[-1]).backward()
    a, b = outs
    grads = [(x.grad, y.grad) for x, y in zip(mine.parameters(), plain.parameters(), strict=True) if y.grad is not None]
    tensors = [(loss_of(a), loss_of(b)), *grads]
    near = all(float((x - y).norm()) <= TOLERANCE * float(y.norm()) for x, y in tensors)
    return near and (not isinstance(b, tuple) or a[1:] == b[1:])


def symbols_of(model: nn.Module) -> set[str]:
    """The elements that are symbols in the last program."""
    sizes = list(model.zgraph.programs.values())[-1].captured.sizes
    return {size.name for size in sizes.every if len(size.elements) == 1}


def grids(count: int, draw: random.Random, frames: tuple[int, ...] = (1,)) -> list[tuple[int, int, int]]:
    return [(draw.choice(frames), 2 * draw.randint(2, 9), 2 * draw.randint(2, 9)) for _ in range(count)]


def test_images_of_any_size_have_one_program():
    mine, plain = pair()
    for one in ([(1, 4, 6), (1, 8, 10)], [(1, 6, 4), (1, 12, 8)], [(1, 8, 8), (1, 4, 4)], [(1, 20, 6), (1, 6, 14)]):
        assert same(mine, plain, call(*one))
    assert len(mine.zgraph.programs) == 1
    assert symbols_of(mine) == {"grid_0_1_by_2", "grid_0_2_by_2", "grid_1_1_by_2", "grid_1_2_by_2"}


@pytest.mark.slow
def test_equal_images_at_first_say_nothing_of_the_next_ones():
    mine, plain = pair()
    for one in ([(1, 4, 4)] * 2, [(1, 8, 8)] * 2, [(1, 8, 8), (1, 4, 6)], [(1, 6, 14), (1, 8, 8)]):
        assert same(mine, plain, call(*one))
    assert len(mine.zgraph.programs) == 1


@pytest.mark.slow
def test_rows_of_many_images_are_a_sum_of_many_sizes():
    mine, plain = pair()
    draw = random.Random(0)
    for _ in range(3):
        assert same(mine, plain, call(*grids(7, draw)))
    assert len(mine.zgraph.programs) == 1


@pytest.mark.slow
def test_another_number_of_images_has_a_program_for_all_sizes_at_once():
    mine, plain = pair()
    for one in ([(1, 4, 6)], [(1, 8, 4)], [(1, 4, 6), (1, 10, 4)], [(1, 8, 8), (1, 6, 14)], [(1, 12, 6)]):
        assert same(mine, plain, call(*one))
    assert len(mine.zgraph.programs) == 2  # (an image, two images)


@pytest.mark.slow
def test_frames_are_constants_and_the_rest_is_free(caplog):
    mine, plain = pair()
    with caplog.at_level(logging.WARNING, "zgraph"):
        for one in ([(2, 4, 6)], [(3, 8, 4)], [(2, 6, 6)], [(3, 4, 12)], [(2, 10, 4)], [(1, 8, 6)]):
            assert same(mine, plain, call(*one))
    assert len(mine.zgraph.programs) == 3  # (one for each number of frames)
    (told,) = [r.getMessage() for r in caplog.records if "each value of grid[:, 0] is a program" in r.getMessage()]
    assert "one number" in told


@sweep(
    "shapes, dynamic, programs", [("dynamic", None, 1), ("static", None, 3), ("auto", {"grid": "value"}, 3)], quick=1
)
def test_what_the_plan_says_of_sizes_is_done(shapes, dynamic, programs):
    mine, plain = pair(shapes=shapes, dynamic=dynamic)
    for one in ([(1, 4, 6)], [(1, 8, 4)], [(1, 10, 12)]):
        assert same(mine, plain, call(*one))
    assert len(mine.zgraph.programs) == programs


@pytest.mark.slow
def test_a_grid_may_be_of_int32():
    mine, plain = pair()
    for one in ([(1, 4, 6)], [(1, 8, 4)], [(1, 10, 12)], [(1, 8, 6)]):
        assert same(mine, plain, call(*one, dtype=torch.int32))
    assert len(mine.zgraph.programs) == 1


class Resamples(nn.Module):
    """What Qwen3-VL computes of a grid: for each cell the height and width of its image, and where it is in that."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.places = nn.Linear(6, 6), nn.Embedding(7, 6)

    def forward(self, cells, grid):
        counts = grid[:, 1] * grid[:, 2]
        high, wide = torch.repeat_interleave(grid[:, 1], counts), torch.repeat_interleave(grid[:, 2], counts)
        begin = torch.repeat_interleave(F.pad(counts.cumsum(0)[:-1], (1, 0)), counts)
        within = (torch.arange(counts.sum()) - begin) % (high * wide)
        x = self.mix(cells) + self.places(within // wide * 7 // high) + self.places(within % wide * 7 // wide)
        parts = zip(torch.split(x, counts.tolist()), grid.tolist(), strict=True)
        return sum(
            part.view(high, wide, 6).mean(1).square().mean() for part, (_, high, wide) in parts if high * wide > 7
        )


@pytest.mark.slow
def test_cells_that_repeat_what_is_known_of_their_image_have_one_program():
    mine, plain = pair(Resamples)
    for one in ([(1, 4, 6), (1, 8, 10)], [(1, 6, 4), (1, 12, 8)], [(1, 8, 8), (1, 4, 4)], [(1, 20, 6), (1, 6, 14)]):
        assert same(mine, plain, call(*one))
    assert len(mine.zgraph.programs) == 1


@pytest.mark.slow
def test_frames_of_several_videos_are_constants_and_the_rest_is_free():
    mine, plain = pair()
    for one in ([(3, 4, 6), (5, 4, 4)], [(3, 8, 6), (5, 6, 4)], [(5, 4, 4), (3, 4, 8)], [(3, 4, 10), (5, 4, 4)]):
        assert same(mine, plain, call(*one))
    assert len(mine.zgraph.programs) == 2
    assert symbols_of(mine) == {"grid_0_1_by_2", "grid_0_2_by_2", "grid_1_1_by_2", "grid_1_2_by_2"}


class Compares(Images):
    """Decides by an element as a tensor: nothing is known of it then."""

    def forward(self, cells, grid):
        return super().forward(cells, grid) * (2 if (grid[:, 1] * grid[:, 2]).max() > 40 else 1)


@pytest.mark.slow
def test_what_can_not_be_a_size_is_a_constant_as_before():
    mine, plain = pair(Compares)
    for one in ([(1, 4, 6)], [(1, 8, 6)], [(1, 4, 6)], [(1, 8, 6)]):
        assert same(mine, plain, call(*one))
    assert len(mine.zgraph.programs) <= 3


@pytest.mark.slow
def test_elements_that_can_not_be_sizes_take_one_capture_more(monkeypatch, caplog):
    captures = []

    def counted(*args: Any, open_elements: Any = (), **kwargs: Any) -> Any:
        captures.append(bool(open_elements))
        return captured(*args, open_elements=open_elements, **kwargs)

    captured = dynamo.capture_flat
    monkeypatch.setattr(dynamo, "capture_flat", counted)
    mine, plain = pair(Compares)
    with caplog.at_level(logging.WARNING, "zgraph"):
        assert same(mine, plain, call((1, 4, 6)))
    assert captures == [False, True, False]  # (without the values, with symbols, with constants)
    (told,) = [r.getMessage() for r in caplog.records if "elements can't be sizes" in r.getMessage()]
    assert "each value of grid is a program" in told and "test_element_sizes.py" in told


class Writes(Images):
    """Changes a copy of the grid before it is read."""

    def forward(self, cells, grid):
        grid = grid.clone()
        grid[:, 1:] -= 2
        return super().forward(cells, grid + torch.tensor([0, 2, 2]))


class WritesThroughAView(Images):
    def forward(self, cells, grid):
        grid = grid.clone()
        columns = grid[:, 1:]
        torch.add(columns, 2, out=columns)
        grid[:, 1:] -= 2
        return super().forward(cells, grid)


@pytest.mark.parametrize("model", [Writes, pytest.param(WritesThroughAView, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_what_is_written_to_is_known_no_more(model):
    mine, plain = pair(model)
    for one in ([(1, 4, 6)], [(1, 8, 6)], [(1, 6, 6)]):
        assert same(mine, plain, call(*one))


class WritesToItsInput(Images):
    """Reads the sizes, then writes to the input that has them, and gives a number that is made from them."""

    def forward(self, cells, grid):
        loss = super().forward(cells, grid)
        number = grid[0, 1].item()
        grid.add_(7)
        return loss, 2 * number + 1


def test_sizes_are_those_at_the_beginning_of_the_call():
    mine, plain = pair(WritesToItsInput)
    for one in ([(1, 4, 6)], [(1, 8, 10)], [(1, 6, 14)]):
        assert same(mine, plain, call(*one))
        given = call(*one)
        mine(**given)
        assert torch.equal(given["grid"], call(*one)["grid"] + 7)
    assert len(mine.zgraph.programs) == 1


@pytest.mark.slow
def test_a_backward_has_the_sizes_of_its_forward():
    mine, plain = pair()
    for one, next_one in itertools.pairwise([[(1, 4, 6)], [(1, 8, 6)], [(1, 6, 14)], [(1, 4, 4)]]):
        given = call(*one)
        loss = mine(**given)
        given["grid"].copy_(torch.tensor(next_one))  # (as a loader does that reuses memory)
        loss.backward()
        plain(**call(*one)).backward()
        for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
            assert float((a.grad - b.grad).norm()) <= TOLERANCE * float(b.grad.norm())
        mine.zero_grad()
        plain.zero_grad()


class Numbers(nn.Module):
    """Calculates with elements: as sizes, as numbers, and as tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)

    def forward(self, cells, grid):
        _, high, wide = grid[0].tolist()
        (part,) = self.mix(cells).split([high * wide])
        x = part * high + wide / high + grid[0, 2] * 0.5
        x = x + torch.full((6,), high - wide) + torch.arange(wide).sum() * torch.arange(high).sum()
        return (x.sin() * (grid[0] * grid[0].float()).sum().rsqrt()).square().mean(), high * wide, {"wide": wide}


def test_an_element_that_is_a_number_in_arithmetic_is_that_of_the_call():
    mine, plain = pair(Numbers)
    for one in ([(1, 4, 6)], [(1, 8, 10)], [(1, 6, 14)], [(1, 12, 4)]):
        assert same(mine, plain, call(*one))
    assert len(mine.zgraph.programs) == 1
    for one in ([(1, 3, 5)], [(1, 7, 4)], [(1, 8, 9)]):  # (no halves)
        assert same(mine, plain, call(*one))
    assert len(mine.zgraph.programs) == 2


class Decides(nn.Module):
    """Only decides by an element: nothing that a program computes depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)

    def forward(self, cells, grid):
        x = self.mix(cells)
        return (x.sin() if grid[0, 1].item() > 8 else x.cos()).square().mean()


class DecidesAndReads(Decides):
    def forward(self, cells, grid):
        return super().forward(cells, grid) * grid[0, 2]


@sweep(
    "model, shapes",
    [(Decides, "auto"), (Decides, "dynamic"), (DecidesAndReads, "auto"), (DecidesAndReads, "dynamic")],
    quick=1,
)
def test_each_side_of_a_decision_is_checked(model, shapes):
    mine, plain = pair(model, shapes=shapes)
    cells = torch.randn(5, 6)
    for high in (4, 6, 12, 5, 14, 9, 8, 3):
        assert same(mine, plain, {"cells": cells, "grid": torch.tensor([[1, high, 3 + high % 3]])})


class Lists(nn.Module):
    """Takes parts of its rows, as many as a list says; reads it as a number, too."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)

    def forward(self, cells, counts):
        parts = self.mix(cells).split([max(n, 0) for n in counts.tolist()])
        return sum(part.sin().sum() * n for part, n in zip(parts, counts.tolist(), strict=True)) / 10


@pytest.mark.slow
def test_a_list_may_have_zeros_ones_negative_numbers_and_any_length():
    mine, plain = pair(Lists)
    lists = ([3, 5], [4, 2], [6, 7], [2, 3, 4], [5, 2, 2], [3, 0, 4], [1, 6, 2], [2, -3, 4], [0, 0, 5], [9, 0, 2])
    for counts in lists:
        rows = sum(max(n, 0) for n in counts)
        assert same(mine, plain, {"cells": torch.randn(rows, 6), "counts": torch.tensor(counts)})
    assert len(mine.zgraph.programs) <= 8  # (the first; two, three; a zero, a one, a negative one; two zeros)


class Wraps(nn.Module):
    """Multiplies elements in their own dtype, which wraps around for large ones."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)

    def forward(self, cells, grid):
        (area,) = (grid[:, 1] * grid[:, 2] * grid[:, 1]).tolist()
        part = cells[: grid[0, 0].item()]
        return self.mix(part).sin().mean() * (area / 1e6)


@sweep("dtype", [torch.int16, torch.int8], quick=1)
def test_of_small_dtypes_nothing_is_known(dtype):
    mine, plain = pair(Lists)
    for counts in ([3, 5], [4, 2], [6, 7]):
        given = {"cells": torch.randn(sum(counts), 6), "counts": torch.tensor(counts, dtype=dtype)}
        assert same(mine, plain, given)
    assert len(mine.zgraph.programs) == 3


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_products_wrap_around_as_in_plain_pytorch(dtype):
    mine, plain = pair(Wraps)
    cells = torch.randn(5, 6)
    for high in (40, 50, 60, 1_000_000, 70_000, 80, 3_000_000, 5_000_000_000 if dtype is torch.int64 else 2_000_000):
        assert same(mine, plain, {"cells": cells, "grid": torch.tensor([[3, high, 1000 + high % 7]], dtype=dtype)})


@pytest.mark.slow
def test_a_call_whose_sizes_do_not_fit_each_other_is_no_silent_one():
    mine, plain = pair()
    for one in ([(1, 4, 6)], [(1, 8, 6)], [(1, 6, 14)]):
        assert same(mine, plain, call(*one))
    for rows in (44, 56):
        wrong = {"cells": torch.randn(rows, 6), "grid": torch.tensor([[1, 8, 6]])}
        with pytest.raises(RuntimeError):
            plain(**wrong)
        with pytest.raises((ZgraphError, RuntimeError)):
            mine(**wrong)
    assert same(mine, plain, call((1, 10, 8)))


@pytest.mark.slow
def test_a_grid_need_not_be_contiguous_and_a_batch_may_have_many_images():
    mine, plain = pair()
    for high in (4, 6, 8):
        given = call((1, high, 6), (1, 4, high))
        given["grid"] = given["grid"].T.contiguous().T
        assert same(mine, plain, given)
    for wide in (4, 6):  # (more numbers than can be sizes)
        assert same(mine, plain, call(*[(1, 4, wide)] * 23))


@pytest.mark.slow
@pytest.mark.parametrize("shapes", ["auto", "dynamic"])
def test_random_images_have_few_programs(shapes):
    mine, plain = pair(shapes=shapes)
    draw = random.Random(0)
    for _ in range(40):
        assert same(mine, plain, call(*grids(draw.randint(1, 3), draw)))
    assert len(mine.zgraph.programs) == 3


@pytest.mark.inductor
@pytest.mark.slow
def test_inductor_takes_them():
    mine, plain = pair(backend="inductor")
    for one in ([(1, 4, 6)], [(1, 8, 10)], [(1, 6, 14)], [(1, 12, 4)]):
        assert same(mine, plain, call(*one))
    assert len(mine.zgraph.programs) == 1


@pytest.mark.slow
def test_a_program_of_elements_is_written_and_read_back():
    mine, plain = pair()
    assert same(mine, plain, call((1, 4, 6), (1, 8, 10)))
    program = mine.zgraph.programs["train0"].captured
    again = from_json(json.loads(json.dumps(to_json(program))))
    verify_program(again)
    assert again.sizes == program.sizes and render(again) == render(program)


@pytest.mark.slow
def test_verify_compares_them_with_the_plain_model():
    found = zgraph.verify(Images(), zgraph.Plan(backend="eager", shapes="dynamic"), 1, call((1, 4, 6)), compiled=True)
    assert found.ok


# Ranks.
STEPS = [
    ([(1, 4, 6)], [(1, 8, 4)]),
    ([(1, 4, 8), (1, 6, 4)], [(1, 10, 6)]),
    ([(1, 4, 4)], [(1, 6, 6), (1, 4, 12)]),
    ([(1, 8, 8)], [(1, 8, 8)]),
    ([(1, 12, 4)], [(2, 4, 6)]),  # (frames of one rank)
]


def on_ranks(zero: int, model: type[nn.Module], steps: Any) -> tuple[float, list[str]]:
    mine, plain = pair(model, zero=zero)
    worst = 0.0
    for each in steps:
        mine(**call(*each[dist.get_rank()])).backward()
        for one in each:
            (plain(**call(*one)) / len(each)).backward()
        for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
            worst = max(worst, float((whole(a.grad) - b.grad).norm() / b.grad.norm()))
        mine.zero_grad()
        plain.zero_grad()
    return worst, list(mine.zgraph.programs)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("zero", [3, 0])
def test_ranks_have_images_of_other_sizes_and_numbers(two, zero):
    for worst, programs in two.run(on_ranks, zero, Images, STEPS):
        assert worst < TOLERANCE and len(programs) == 3  # (an image, two images, two frames)


@pytest.mark.gloo
@pytest.mark.slow
def test_ranks_whose_elements_can_not_be_sizes(two):
    for worst, programs in two.run(on_ranks, 3, Compares, STEPS[:2] + STEPS[3:4]):
        assert worst < TOLERANCE and len(programs) == 5  # (one for each grid)

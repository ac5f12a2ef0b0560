"""Elements that are sizes, and their products, in what a plan says of sizes: programs of their own, budgets, programs at a point."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from test_element_sizes import Compares, Images, call, grids, pair, same
from torch import nn

import zgraph
from zgraph.build.planned_step import captured_program
from zgraph.cli.targets import TargetError
from zgraph.passes.analysis.live_memory import memory_of

HALF = {"grid_0_1_by_2": 2, "grid_0_2_by_2": 3}  # an image of 4 x 6 cells


def test_sizes_that_occur_often_may_be_elements(caplog):
    hot = [HALF, {"grid_0_1_by_2": 2}, {**HALF, "grid_0_1_by_2_times_grid_0_2_by_2": 5}]
    mine, plain = pair(shapes={"hot": hot})
    with caplog.at_level(logging.WARNING, "zgraph"):
        for one in ([(1, 4, 6)], [(1, 8, 4)], [(1, 6, 4)], [(1, 4, 6)]):
            assert same(mine, plain, call(*one))
    assert list(mine.zgraph.programs) == ["train0", "train0.grid_0_1_by_2_2_grid_0_2_by_2_3"]
    runs = mine.zgraph.programs["train0.grid_0_1_by_2_2_grid_0_2_by_2_3"].history().program
    assert not runs.sizes
    told = [r.getMessage() for r in caplog.records if "no program of its own" in r.getMessage()]
    assert "grid_0_2_by_2 is not said" in told[0]
    assert "holds where grid_0_1_by_2_times_grid_0_2_by_2 == grid_0_1_by_2 * grid_0_2_by_2" in told[1]


@pytest.mark.slow
def test_the_most_frequent_images_are_found():
    mine, plain = pair(shapes={"hot": 1})
    draw = random.Random(0)
    for number in range(36):
        assert same(mine, plain, call(*([(1, 4, 10)] if number % 2 else grids(1, draw))))
    assert list(mine.zgraph.programs) == ["train0", "train0.grid_0_1_by_2_2_grid_0_2_by_2_5"]


@pytest.mark.slow
def test_programs_at_a_point_have_the_products_of_its_elements():
    mine, plain = pair()
    assert same(mine, plain, call((1, 4, 6)))
    inspection = mine.zgraph.inspect()
    at = inspection.at({"grid_0_1_by_2": 5})  # (the width is the typical one)
    (program,) = (way.last.program for way in at.ways.values())
    shapes = [tuple(n.meta["val"].shape) for n in program.graph.find_nodes(op="placeholder")]
    assert not program.sizes and (10 * 6, 6) in shapes
    with pytest.raises(TargetError, match="not for these sizes"):
        inspection.at({**HALF, "grid_0_1_by_2_times_grid_0_2_by_2": 7})
    with pytest.raises(TargetError, match="not for these sizes"):
        inspection.at({**HALF, "batch": 7})


class Tabled(Images):
    """Has a table of positions, which bounds heights and widths."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Embedding(16, 6), nn.Embedding(12, 6)

    def forward(self, cells, grid):
        places = [
            (self.rows(torch.arange(high))[:, None] + self.columns(torch.arange(wide))[None]).flatten(0, 1)
            for _, high, wide in grid.tolist()
        ]
        return super().forward(cells + torch.cat(places), grid)


@pytest.mark.slow
def test_a_budget_holds_for_the_largest_images():
    mine, plain = pair(Tabled, memory_budget="1MiB")
    for one in ([(1, 4, 6)], [(1, 8, 4)], [(1, 16, 12)], [(1, 6, 10)]):
        assert same(mine, plain, call(*one))
    (step,) = mine.zgraph.programs.values()
    sizes, program = step.captured.sizes, step.history().program
    assert not sizes.unbounded
    assert sizes.largest["grid_0_1_by_2"] == 8 and sizes.largest["grid_0_2_by_2"] == 6
    assert sizes.largest["grid_0_1_by_2_times_grid_0_2_by_2"] == 48 and 16 * 12 in sizes.largest.values()
    peaks = [
        max(
            sum(at.values())
            for at in memory_of(program.at(sizes.point({"grid_0_1_by_2": high, "grid_0_2_by_2": wide})))
        )
        for high, wide in ((8, 6), (2, 3), (8, 2))
    ]
    assert max(sum(at.values()) for at in memory_of(program)) >= max(peaks) == peaks[0]


@pytest.mark.slow
def test_images_without_a_largest_size_are_constants_beside_a_budget(caplog):
    mine, plain = pair(memory_budget="1MiB")
    with caplog.at_level(logging.WARNING, "zgraph"):
        for one in ([(1, 4, 6)], [(1, 8, 4)], [(1, 4, 6)]):
            assert same(mine, plain, call(*one))
    assert len(mine.zgraph.programs) == 2
    told = [r.getMessage() for r in caplog.records if "is a program of its own" in r.getMessage()]
    assert "each value of grid is a program of its own" in told[0] and "how large" in told[0]


@pytest.mark.slow
def test_verify_takes_elements_beside_a_budget():
    plan = zgraph.Plan(backend="eager", shapes="dynamic", memory_budget="1MiB")
    assert zgraph.verify(Tabled(), plan, 1, call((1, 4, 6)), compiled=True).ok


@pytest.mark.slow
def test_what_is_looked_at_without_a_run_finds_elements():
    program = captured_program(Images(), zgraph.Plan(backend="eager"), call((1, 4, 6), (1, 8, 10)), 1)
    assert program.sizes.needed == ("grid_0_1_by_2", "grid_0_2_by_2", "grid_1_1_by_2", "grid_1_2_by_2")
    constants = captured_program(Compares(), zgraph.Plan(backend="eager"), call((1, 4, 6)), 1)
    assert not constants.sizes

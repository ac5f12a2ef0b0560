"""Inputs whose values decide in forward: each value has a program of its own, and gradients are those of plain PyTorch."""

from __future__ import annotations

import copy
import logging
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sweeps import sweep
from torch import nn
from torch.nn import functional as F

import zgraph
from zgraph.errors import CaptureError, PlanError, SignatureError


class Grids(nn.Module):
    """Takes means over the cells of grids, which lie one behind the other in its rows, as `grid` says; words with their own length beside."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out, self.embed = nn.Linear(6, 6), nn.Linear(6, 6), nn.Embedding(9, 6)

    def forward(self, cells, grid, words=None, scale=None):
        found, at = [], 0
        for high, wide in grid.tolist():
            part = self.mix(cells[at : at + high * wide]).view(high, wide, 6)
            found.append(part.sin().mean(0).mean(0) if high > 2 else part.cos().mean(0).mean(0))
            at += high * wide
        made = self.out(torch.stack(found)).square().mean()
        if words is not None:
            made = made + self.embed(words).sin().mean()
        return made if scale is None else made * scale


def call(grids: list[list[int]], rows: int = 0, length: int = 0, **more: Any) -> dict[str, Any]:
    cells = sum(high * wide for high, wide in grids)
    draw = torch.Generator().manual_seed(cells + 10 * rows + 100 * length)
    words = {"words": torch.randint(0, 9, (rows, length), generator=draw)} if rows else {}
    return {"cells": torch.randn(cells, 6, generator=draw), "grid": torch.tensor(grids), **words, **more}


def pair(model: type[nn.Module] = Grids, dynamic: Any = None, **plan: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = model()
    return zgraph.compile(copy.deepcopy(plain), zgraph.Plan(backend="eager", **plan), dynamic=dynamic), plain


def same(mine: nn.Module, plain: nn.Module, given: dict[str, Any]) -> bool:
    losses = []
    for model in (mine, plain):
        model.zero_grad()
        losses.append(model(**given))
        losses[-1].backward()
    grads = [(a.grad, b.grad) for a, b in zip(mine.parameters(), plain.parameters(), strict=True)]
    return torch.equal(*losses) and all(b is None or torch.equal(a, b) for a, b in grads)


CALLS = [
    call([[2, 3], [3, 2]], 3, 4),
    call([[2, 3], [3, 2]], 3, 7),
    call([[3, 2], [2, 3]], 3, 7),  # (the same sizes, other values)
    call([[4, 3]], 2, 11),
    call([[2, 3], [3, 2]], 2, 12),
    call([[4, 3]], 4, 3),
]


@sweep("dynamic", [{"grid": "value"}, None], quick=1, ids=["declared", "found"])
def test_each_value_has_a_program_that_serves_all_sizes_beside(dynamic, caplog):
    mine, plain = pair(dynamic=dynamic)
    with caplog.at_level(logging.WARNING, "zgraph"):
        assert all([same(mine, plain, given) for given in CALLS])
    # (each value, the first at its sizes alone, and once more since its cells may differ; where widths became symbols,
    # all heights)
    assert len(mine.zgraph.programs) == (4 if dynamic else 3)
    told = [r.getMessage() for r in caplog.records if "each value of grid has a program" in r.getMessage()]
    assert len(told) == (dynamic is None)
    assert dynamic or 'dynamic={"grid": "value"}' in told[0]


def test_a_plan_file_may_say_it_and_static_shapes_take_it(tmp_path):
    mine, plain = pair(dynamic={"grid": "value"}, shapes="static")
    assert all([same(mine, plain, given) for given in CALLS[:3]])
    assert len(mine.zgraph.programs) == 3
    file = tmp_path / "plan.toml"
    file.write_text('[dynamic]\ngrid = "value"\n')
    assert zgraph.Plan.load(file).dynamic["grid"] == "value"


class Windows(Grids):
    """Orders the cells of each grid by windows, as vision models with windowed attention do: what a mask selects, which values alone decide."""

    def forward(self, cells, grid, written=False):
        order, ends = [], [0]
        for high, wide in grid.tolist():
            index = F.pad(torch.arange(high * wide).view(high, wide), (0, 2 - wide % 2, 0, 2 - high % 2), value=-100)
            index = index.view(index.shape[0] // 2, 2, -1, 2).transpose(1, 2).reshape(-1, 4)
            if written:
                index[0, 0] = 1
            counts = (index != -100).sum(1)
            ends.extend((counts.cumsum(0) + ends[-1]).tolist())
            order.append(index[index != -100] + ends[-counts.numel() - 1])
        ends = torch.unique_consecutive(torch.tensor(ends))
        rows = self.mix(cells)[torch.cat(order)]
        weights = torch.arange(len(ends)).repeat_interleave(torch.cat([ends[:1], ends.diff()]))
        return {"loss": (rows.sin() * weights[:, None]).square().mean(), "view": grid.view(-1)}


@pytest.mark.slow
def test_what_masks_select_of_known_values_is_known():
    mine, plain = pair(Windows)
    for grids in ([[2, 3], [3, 2]], [[4, 4], [3, 5]], [[2, 3], [3, 2]]):
        given = call(grids)
        for model in (mine, plain):
            model.zero_grad()
            out = model(**given)
            out["loss"].backward()
            assert out["view"].data_ptr() == given["grid"].data_ptr()
        assert torch.equal(mine.mix.weight.grad, plain.mix.weight.grad)
    assert len(mine.zgraph.programs) <= 5


@pytest.mark.slow
def test_what_is_written_to_is_known_no_more():
    mine, plain = pair(Windows)
    try:
        loss = mine(**call([[2, 3]]), written=True)["loss"]
    except CaptureError as error:
        assert "test_value_inputs.py" in str(error)
    else:
        assert torch.equal(loss, plain(**call([[2, 3]]), written=True)["loss"])


class Chooses(nn.Module):
    """Decides by one number of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x, which, labels):
        layer = self.one if which[0] > 3 else self.two
        return (layer(x).mean(1) - labels).square().mean()


@pytest.mark.slow
def test_only_the_input_that_decides_is_taken():
    mine, plain = pair(Chooses)
    for which, rows in ((2, 3), (4, 3), (4, 6), (2, 5)):
        labels = torch.arange(rows)
        assert same(mine, plain, {"x": torch.randn(rows, 5), "which": torch.tensor([which] * 8), "labels": labels})
    assert len(mine.zgraph.programs) == 4  # (2 and 4 at the first rows; then 4 and 2 for any)


class Hopeless(nn.Module):
    """Decides by a value that it computes of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(5, 5)

    def forward(self, x, number):
        y = self.mix(x)
        return (y if y.sum() > number[0] else y.sin()).square().mean()


def test_where_no_input_helps_the_first_error_is_raised():
    mine, _ = pair(Hopeless)
    for _ in range(2):
        with pytest.raises(CaptureError) as found:
            mine(torch.randn(3, 5), torch.tensor([1]))
        assert "test_value_inputs.py" in str(found.value)


# What can't be.
@pytest.mark.parametrize(
    ("dynamic", "given", "said"),
    [
        ({"cells": "value"}, CALLS[0], "72 values of float32"),
        ({"words": "value"}, call([[2, 3]], 70, 80), "5,600 values of int64; whole numbers can, up to 4,096"),
        ({"scale": "value"}, {**CALLS[0], "scale": 2.0}, "no tensor, but a float"),
        ({"scale": "value"}, {**CALLS[0], "scale": {"a": torch.ones(2)}}, r"name one of them: .*scale.*a"),
    ],
    ids=["floats", "large", "number", "dict"],
)
def test_what_can_not_be_a_constant_is_refused(dynamic, given, said):
    mine, _ = pair(dynamic=dynamic)
    with pytest.raises(SignatureError, match="can't be constants") as found:
        mine(**given)
    assert re.search(said, str(found.value)) and "dynamic." in found.value.where


class TakesAny(Grids):
    def forward(self, cells, grid, **others):
        return super().forward(cells, grid, **others)


def test_an_input_that_does_not_exist(caplog):
    with pytest.raises(PlanError, match="no argument 'gird'") as found:
        pair(dynamic={"gird": "value"})
    assert "grid" in found.value.hint
    mine, plain = pair(TakesAny, dynamic={"gird": "value", "grid": "value"})
    with caplog.at_level(logging.WARNING, "zgraph"):
        assert same(mine, plain, CALLS[0]) and same(mine, plain, CALLS[1])
    (told,) = [r.getMessage() for r in caplog.records if "is no argument of this call" in r.getMessage()]
    assert "'gird'" in told and "did you mean 'grid'" in told


def test_a_batch_may_lack_an_input_whose_values_are_constants():
    mine, plain = pair(dynamic={"grid": "value", "scale": "value"})
    assert same(mine, plain, CALLS[0])
    assert same(mine, plain, {**CALLS[0], "scale": torch.tensor(3)})
    assert same(mine, plain, {**CALLS[0], "scale": torch.tensor(4)})
    assert len(mine.zgraph.programs) == 3


def test_many_values_are_told_with_the_way_out(caplog):
    mine, plain = pair(dynamic={"grid": "value"}, max_programs=5)
    with caplog.at_level(logging.WARNING, "zgraph"):
        for high in range(1, 6):
            assert same(mine, plain, call([[high, 2]]))
    (told,) = [r.getMessage() for r in caplog.records if "calls of one structure" in r.getMessage()]
    assert "argument 'grid' differs from call to call ([[1, 2]], [[2, 2]], [[3, 2]], [[4, 2]])" in told
    assert "let few of them occur" in told and "torch.tensor" not in told


@pytest.mark.inductor
@pytest.mark.slow
def test_inductor_takes_them():
    """Two values, one of which is met at two sizes."""
    _, plain = pair()
    plan = zgraph.Plan(backend="inductor", shapes="dynamic")
    mine = zgraph.compile(copy.deepcopy(plain), plan, dynamic={"grid": "value"})
    for given in (call([[2, 3]], 3, 4), call([[2, 3]], 2, 7), call([[3, 2]], 3, 7)):
        losses = [model(**given) for model in (mine, plain)]
        torch.testing.assert_close(*losses)
    assert len(mine.zgraph.programs) == 2


# Ranks.
def on_ranks(zero: int, declared: bool, backend: str) -> tuple[float, list[str]]:
    torch.manual_seed(0)
    plain = Grids()
    dynamic = {"grid": "value"} if declared else None
    model = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(zero=zero, backend=backend), dynamic=dynamic)
    worst = 0.0
    for first, second in ((0, 2), (1, 4), (3, 5), (5, 0)):
        model(**CALLS[(first, second)[dist.get_rank()]]).backward()
        for at in (first, second):
            (plain(**CALLS[at]) / 2).backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            grad = a.grad.full_tensor() if hasattr(a.grad, "full_tensor") else a.grad
            worst = max(worst, float((grad - b.grad).norm() / b.grad.norm()))
        model.zero_grad()
        plain.zero_grad()
    return worst, list(model.zgraph.programs)


@pytest.mark.gloo
@pytest.mark.parametrize("zero, declared", [(3, True), (0, False), (3, False)])
@pytest.mark.slow
def test_ranks_may_have_other_values_in_one_step(two, zero, declared):
    for worst, programs in two.run(on_ranks, zero, declared, "eager"):
        assert worst < 2e-6
        assert len(programs) == 3  # (one for each value)


class GivesEach(nn.Module):
    """Gives a tensor for each part of its rows, before the loss: where that stands among its outputs depends on how many parts there are."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x, parts):
        found = [self.mix(part).mean(0) for part in x.split(parts.tolist())]
        return {"parts": found, "loss": self.out(torch.stack(found)).square().mean()}


def outputs_for_each_value() -> float:
    torch.manual_seed(0)
    plain = GivesEach()
    model = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(zero=3, backend="eager"), dynamic={"parts": "value"})
    worst = 0.0
    for turn in ([[2, 3], [4, 2, 3]], [[4, 2, 3], [2, 3]], [[2, 3], [2, 3]]):
        mine = turn[dist.get_rank()]
        model(torch.ones(sum(mine), 6), torch.tensor(mine))["loss"].backward()
        for parts in turn:
            (plain(torch.ones(sum(parts), 6), torch.tensor(parts))["loss"] / 2).backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            worst = max(worst, float((a.grad.full_tensor() - b.grad).norm() / b.grad.norm()))
        model.zero_grad()
        plain.zero_grad()
    return worst


@pytest.mark.gloo
def test_ranks_may_have_other_numbers_of_outputs_in_one_step(two):
    assert max(two.run(outputs_for_each_value)) < 2e-6

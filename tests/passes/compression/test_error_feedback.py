"""Gradients that are rounded by chance, and those whose loss is added to the next: right on average, repeatable, and step for step the algorithm."""

from __future__ import annotations

import itertools
import logging
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from padded_rows import PaddedRows
from ranks import Ranks
from sweeps import sweep
from torch import nn

import zgraph
from zgraph.build.planned_step import programs
from zgraph.errors import PlanError
from zgraph.passes.analysis.live_memory import memory_of
from zgraph.program.block_quantization import (
    FORMATS,
    FROM_BLOCKS,
    TO_BLOCKS,
    TO_BLOCKS_DRAWN,
    TO_BLOCKS_FED,
    most_wrong,
)
from zgraph.program.program import InputRole

BOTH = {"reduce": "int4", "error_feedback": True, "rounding": "stochastic"}
SGD = zgraph.SGD(lr=0.1)


def plan(**fields) -> zgraph.Plan:
    return zgraph.Plan(**{"mesh": {"dp": -1}, "zero": 2, "backend": "eager", "optimizer": SGD, **fields})


# -- operators --------------------------------------------------------------------------------------------------------
def drawn(x: torch.Tensor, format: str, draws: int, place: int = 0, parts: int = 1) -> torch.Tensor:
    sent = TO_BLOCKS_DRAWN(x, torch.tensor(draws), [torch.tensor(place)], format, 64, parts)
    return FROM_BLOCKS(sent, format, 64, parts, list(x.shape), torch.float32)


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_drawn_is_right_on_average_and_one_of_two_neighbours(format: str) -> None:
    x = torch.randn(3, 100, generator=torch.Generator().manual_seed(1)) * 3
    many = torch.stack([drawn(x, format, n) for n in range(400)])
    bound = most_wrong(x, format, 64, 1, drawn=True)
    assert ((many.double() - x.double()).abs() <= bound).all()
    assert all(len(column.unique()) <= 2 for column in many.flatten(1).unbind(1))
    assert ((many.double().mean(0) - x.double()).abs() <= 5 * bound / 2 / math.sqrt(400) + 1e-7).all()


@pytest.mark.parametrize("format", FORMATS)
def test_the_same_step_draws_the_same_and_ranks_and_steps_draw_otherwise(format: str) -> None:
    x = torch.randn(2, 300, generator=torch.Generator().manual_seed(2))
    error = lambda *at: (drawn(x, format, *at) - x).flatten()  # noqa: E731
    assert torch.equal(error(5, 1), error(5, 1))
    for other in (error(5, 0), error(6, 1)):
        assert abs(float(torch.corrcoef(torch.stack([error(5, 1), other]))[0, 1])) < 0.5
        assert not torch.equal(error(5, 1), other)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_finite_is_never_drawn_as_if_it_were(format: str, value: float) -> None:
    x = torch.ones(3, 64)
    x[1, 5] = value
    got = drawn(x, format, 3, parts=3)
    assert not got[1, 5].isfinite() and torch.equal(got[::2], x[::2])


def test_the_residual_is_what_was_not_sent_and_stays_where_that_is_not_finite() -> None:
    x, before = torch.randn(128), torch.randn(128) / 8
    residual, scale = before.clone(), torch.tensor(64.0)
    sent = TO_BLOCKS_FED(x, residual, None, [], scale, "int8", 64, 1)
    assert torch.equal(sent, TO_BLOCKS(x + before * 64, "int8", 64, 1))
    back = FROM_BLOCKS(sent, "int8", 64, 1, [128], torch.float32)
    assert torch.equal(residual, (x + before * 64 - back) / 64)
    kept = residual.clone()
    x[3] = math.nan
    TO_BLOCKS_FED(x, residual, None, [], scale, "int8", 64, 1)
    assert torch.equal(residual[:64], kept[:64]) and not torch.equal(residual[64:], kept[64:])


# -- programs ---------------------------------------------------------------------------------------------------------
MESHES = [(2, {"dp": 2}, 2), (0, {"dp": 2}, 2), (1, {"replicate": 2, "dp": 2}, 4)]


@sweep("zero, mesh, world", MESHES, quick=(0,), ids=str)
def test_each_value_is_within_its_bound(zero: int, mesh: dict[str, int], world: int) -> None:
    found = zgraph.verify(PaddedRows(), plan(zero=zero, mesh=mesh, wire=BOTH), world, (torch.randn(8, 40),))
    assert found.ok and any(d.what == "sent gradient" for d in found.differences), str(found)


def test_residuals_are_in_the_memory_of_a_step() -> None:
    inputs = (torch.randn(8, 40),)
    program = programs(PaddedRows(), plan(wire=BOTH), inputs, 2).program
    shapes = {n: v.meta["val"].numel() for n, v in program.input_nodes(InputRole.RESIDUAL).items()}
    assert shapes == {"a.weight/dp": 2400, "b.weight/dp": 38 * 60, "b.bias/dp": 38}  # (37 rows are padded)
    assert memory_of(program)[-1]["residuals"] == 4 * sum(shapes.values())


def test_a_budget_without_room_for_residuals_is_refused() -> None:
    inputs = (torch.randn(8, 40),)
    enough = plan(wire={"reduce": "int8"}, memory_budget=64 << 10)
    programs(PaddedRows(), enough, inputs, 2)
    with pytest.raises(PlanError, match="residuals 18872 bytes of wire"):
        programs(PaddedRows(), plan(wire={"reduce": "int8", "error_feedback": True}, memory_budget=64 << 10), inputs, 2)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"wire": {"error_feedback": True}}, "gradients are sent as they are"),
        ({"wire": {"rounding": "stochastic"}}, "gradients are sent as they are"),
        ({"wire": {"reduce": "int8", "rounding": "up"}}, "rounding"),
        ({"wire": BOTH, "optimizer": None}, "no optimizer"),
        ({"wire": BOTH, "mesh": {"pp": 2, "dp": -1}}, "pipeline"),
    ],
)
def test_a_wrong_plan_is_refused(fields, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan(**fields)


# -- ranks ------------------------------------------------------------------------------------------------------------
STEPS = 60


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * step + rank))


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    whole = lambda p: p.full_tensor() if hasattr(p, "full_tensor") else p  # noqa: E731
    return {n: whole(p.detach()).clone() for n, p in model.named_parameters()}


def path(wire: dict, zero: int, steps: int, backend: str = "eager") -> list[dict[str, torch.Tensor]]:
    """The weights before the first step, and after each."""
    model = zgraph.compile(PaddedRows(), plan(zero=zero, wire=wire, backend=backend))
    found = [weights(model)]
    for step in range(steps):
        model.zgraph.train_step(batch(step, dist.get_rank()))
        found.append(weights(model))
    return found


class ByThePaper:
    """Error feedback as in "1-bit SGD" (Seide et al., 2014) and "EF-SGD" (Karimireddy et al., 2019): with g the gradient of rank r,

    p = g + e_r,  sent = C(p),  e_r = p - sent,  and all ranks step along the mean of what was sent.
    """

    def __init__(self, wire: dict, ranks: int) -> None:
        self.fed, self.by_chance = wire.get("error_feedback", False), wire.get("rounding") == "stochastic"
        self.told = (wire["reduce"], 256, ranks)
        self.net, self.ranks = PaddedRows(), ranks
        self.errors: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks)]

    def sent(self, rank: int, step: int, name: str, grad: torch.Tensor) -> torch.Tensor:
        missing = -grad.shape[0] % self.ranks
        p = torch.cat([grad, grad.new_zeros(missing, *grad.shape[1:])])
        p = p + self.errors[rank].get(name, 0.0) if self.fed else p
        drawn = (torch.tensor(step + 1), [torch.tensor(rank)])
        sent = TO_BLOCKS_DRAWN(p, *drawn, *self.told) if self.by_chance else TO_BLOCKS(p, *self.told)
        back = FROM_BLOCKS(sent, *self.told, list(p.shape), torch.float32)
        self.errors[rank][name] = p - back
        return back[: grad.shape[0]]

    def step(self, number: int, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weights after a step from these."""
        self.net.load_state_dict(before)
        total: dict[str, torch.Tensor] = {}
        for rank in range(self.ranks):
            self.net.zero_grad()
            self.net(batch(number, rank)).backward()
            for name, param in self.net.named_parameters():
                total[name] = total.get(name, 0.0) + self.sent(rank, number, name, param.grad)
        return {n: before[n] - 0.1 * total[n] / self.ranks for n in before}


WIRES = [
    BOTH,
    {"reduce": "int4", "error_feedback": True},
    {"reduce": "int8", "rounding": "stochastic"},
    {"reduce": "bf16", "error_feedback": True},
]


def follows_the_paper(ranks: Ranks, world: int, wire: dict) -> None:
    expected = ByThePaper(wire, world)
    found, *others = ranks.run(path, wire, 3, STEPS)
    for step, (before, after) in enumerate(itertools.pairwise(found)):
        for name, value in expected.step(step, before).items():
            assert (value - after[name]).abs().max() <= 1e-6, (step, name)
    assert all(torch.equal(found[-1][n], other[-1][n]) for other in others for n in found[-1])


@pytest.mark.gloo
@sweep("wire", WIRES, quick=(0,), ids=str)
def test_two_ranks_do_what_the_algorithm_says(two: Ranks, wire: dict) -> None:
    follows_the_paper(two, 2, wire)


@pytest.mark.gloo
@pytest.mark.slow
def test_four_ranks_do_what_the_algorithm_says(four: Ranks) -> None:
    follows_the_paper(four, 4, BOTH)


@pytest.mark.gloo
@pytest.mark.inductor
@pytest.mark.slow
def test_inductor_writes_residuals_too(two: Ranks) -> None:
    eager, compiled = (two.run(path, BOTH, 3, 20, backend)[0] for backend in ("eager", "inductor"))
    for name, value in eager[
        -1
    ].items():  # (a gradient that is rounded otherwise by float32 may be sent as the next number)
        assert (compiled[-1][name] - value).norm() <= 0.02 * value.norm(), name
    assert not torch.equal(eager[-1]["b.weight"], eager[0]["b.weight"])


def restarted(folder: Path, zero: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights of a run, and of one that was saved in the middle and loaded into a new model."""
    first, second = (zgraph.compile(PaddedRows(), plan(zero=zero, wire=BOTH)) for _ in range(2))
    for step in range(6):
        if step == 3:
            first.save_checkpoint(folder)
        first.zgraph.train_step(batch(step, dist.get_rank()))
    second.load_checkpoint(folder)
    for step in range(3, 6):
        second.zgraph.train_step(batch(step, dist.get_rank()))
    return weights(first), weights(second)


@pytest.mark.gloo
@sweep("zero", [3, 0], quick=(0,))
def test_a_restart_in_the_middle_is_bit_for_bit(
    two: Ranks, tmp_path: Path, zero: int, caplog: pytest.LogCaptureFixture
) -> None:
    for one, other in two.run(restarted, tmp_path, zero):
        assert all(torch.equal(one[n], other[n]) for n in one)
    alone = zgraph.compile(PaddedRows(), plan(mesh={"dp": 1}, zero=zero, wire=BOTH))
    with caplog.at_level(logging.WARNING, "zgraph"):
        alone.load_checkpoint(tmp_path)
    assert "begin at zero" in caplog.text and "{'dp': 2}" in caplog.text

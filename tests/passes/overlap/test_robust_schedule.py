"""A schedule is made from costs that are estimates: it loses little if they are wrong, and next to nothing if they are right."""

from __future__ import annotations

import functools

import pytest
import torch
from sweeps import sweep
from torch import nn

import zgraph
from zgraph.build.planned_step import captured_program, planned_step
from zgraph.passes.analysis.costs import CPU, Costs, Hardware, Link
from zgraph.passes.analysis.simulator import simulate_step
from zgraph.passes.overlap import overlap, robust_schedule
from zgraph.passes.overlap.robust_schedule import CandidateSchedule, Event, least_regret
from zgraph.passes.overlap.scheduling_problem import Bucket

pytestmark = pytest.mark.core

PLAN = zgraph.Plan(mesh={"dp": 2}, zero=3, backend="eager")


class Block(nn.Module):
    """Products of several sizes, so that layers are not all of one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.wide, self.narrow, self.out = nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 64)

    def forward(self, x):
        return x + self.out(self.narrow(torch.relu(self.wide(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.head = nn.Linear(64, 512, bias=False)

    def forward(self, x):
        return self.head(self.blocks(x)).square().mean()


@functools.cache
def captured(layers: int):
    with torch.device("meta"):
        model, inputs = Stack(layers), (torch.empty(128, 64),)
    return model, inputs, captured_program(model, PLAN, inputs, 2)


def machine(link: float, products: float = 1.0) -> Hardware:
    """Transfers take about as long as computing at a `link` of 1."""
    links = {"*": Link(bandwidth=4e7 * link, latency=1e-5)}
    return CPU.model_copy(update={"flops": {"float32": 1e10 * products}, "memory": 1e10 * products, "links": links})


def step(believed: Hardware, true: Hardware, layers: int = 4) -> float:
    """Seconds of a step that was scheduled by one machine on another."""
    model, inputs, program = captured(layers)
    made = planned_step(model, PLAN, inputs, 2, Costs(believed, fused=False), captured=program)
    return simulate_step(made.step.history().program, None, Costs(true, fused=False)).seconds


def losses(rate: float) -> list[float]:
    """What the step takes with costs that are wrong by 4, by what it takes with true ones."""
    true = machine(rate)
    least = step(true, true)
    wrong = [machine(4 * rate), machine(rate / 4), machine(rate, 4.0), machine(rate, 0.25)]
    return [step(believed, true) / least for believed in wrong]


@sweep("rate", [0.5, 1.0, 2.0], quick=(1,))
def test_costs_that_are_wrong_by_four_cost_five_percent_at_most(rate):
    assert max(losses(rate)) < 1.05


@pytest.mark.slow
def test_the_schedule_for_the_costs_alone_would_lose_more(monkeypatch):
    monkeypatch.setattr(overlap, "SPEEDS", (1.0,))
    monkeypatch.setattr(robust_schedule, "SPEEDS", (1.0,))
    assert any(max(losses(rate)) > 1.05 for rate in (0.5, 1.0, 2.0))


@pytest.mark.parametrize(("price", "numbers"), [(1.0, [5]), (-1.0, [5, 9])])
def test_speeds_between_are_tried_where_a_schedule_would_lose_more_than_the_price(monkeypatch, price, numbers):
    tried = []

    def spied(schedules):
        tried.append(len(schedules))
        return least_regret(schedules)

    monkeypatch.setattr(overlap, "PRICE", price)
    monkeypatch.setattr(overlap, "least_regret", spied)
    step(machine(1.0), machine(1.0))
    assert tried == numbers


# -- by hand --------------------------------------------------------------------------------------------------------------
def bucket(seconds: float) -> Bucket:
    return Bucket([], seconds, 0.0, 0)


def test_a_schedule_is_replayed_on_other_links():
    first, second = bucket(2.0), bucket(4.0)
    events = [
        Event(bucket=first, ahead=True),
        Event(bucket=first, waits=True),
        Event(bucket=second),
        Event(3.0),
        Event(bucket=second, waits=True),
        Event(1.0),
    ]
    played = CandidateSchedule(events, 1.0, lead=1.0)
    assert (
        played.seconds(1.0) == 1.0 + 4.0 + 1.0
    )  # a second of the first is left, and one of the second behind the operator
    assert played.seconds(2.0) == 3.0 + 1.0 and played.seconds(0.5) == 3.0 + 8.0 + 1.0
    assert CandidateSchedule(events, 2.0, lead=1.0).seconds(2.0) == played.seconds(1.0)


def late_and_early() -> tuple[CandidateSchedule, CandidateSchedule]:
    """A transfer of 1 that starts beside the last second of 12, or beside all of them and with a little work more."""
    b, c = bucket(1.0), Bucket([], 1.0, 0.05, 0)
    late = [Event(11.0), Event(bucket=b), Event(1.0), Event(bucket=b, waits=True)]
    early = [Event(bucket=c), Event(12.0), Event(bucket=c, waits=True)]
    return CandidateSchedule(late, 1.0, 0.0), CandidateSchedule(early, 1.0, 0.0)


def test_the_schedule_with_the_least_regret_is_taken():
    late, early = late_and_early()
    assert late.seconds(1.0) < early.seconds(1.0) and late.seconds(0.25) > early.seconds(0.25)
    assert least_regret([late, early])[0] == 1 and least_regret([late]) == (0, 0.0)


def test_one_that_costs_more_than_the_price_is_not_taken(monkeypatch):
    monkeypatch.setattr(robust_schedule, "PRICE", 0.001)
    assert least_regret(list(late_and_early()))[0] == 0

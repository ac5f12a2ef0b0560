"""Gradients of weights that nothing waits for come behind the last large gradient: to the same numbers, in no more memory, and no later."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from networks import outputs
from sweeps import sweep
from torch import fx, nn

import zgraph
from zgraph.build.planned_step import programs
from zgraph.passes import PassManager
from zgraph.passes.analysis.costs import Costs, Hardware, Link
from zgraph.passes.analysis.live_memory import memory_of
from zgraph.passes.analysis.parameter_collectives import reductions_of
from zgraph.passes.analysis.simulator import simulate
from zgraph.passes.manager import History
from zgraph.passes.overlap.defer_gradients import DeferOptions, defer_gradients
from zgraph.passes.overlap.follow_order import order_of
from zgraph.program import collectives
from zgraph.program.node import Role, info
from zgraph.program.program import Program

pytestmark = pytest.mark.core

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


def words_of(x):
    """Numbers of words, of whatever numbers tests give."""
    return x.mul(100).long().remainder(100)


class Tabled(nn.Module):
    """Layers above a table that is larger than any of them; `tied`: it makes the outputs too."""

    def __init__(self, layers: int = 3, words: int = 128, width: int = 8, *, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, width)) for _ in range(layers)
        )
        self.tied = tied

    def forward(self, x):
        hidden = self.table(words_of(x))
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return (hidden @ self.table.weight.t() if self.tied else hidden).square().mean()


class Gated(nn.Module):
    """The gradient of the first weight is known before its table's, and makes part of the second's."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 8)
        self.first = nn.Parameter(torch.randn(8, 8) / 3)
        self.other = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x):
        weight = self.first @ self.other
        return torch.tanh(self.table(words_of(x)) @ weight).square().mean()


BATCH = (torch.ones(8, 32),)


def machine(bandwidth: float) -> Costs:
    links = {"*": Link(bandwidth=bandwidth)}
    return Costs(Hardware(name="test", flops={"float32": 1e9}, memory=1e30, capacity=1, host=1.0, links=links))


def made(model: nn.Module, bandwidth: float = 1e9, **plan: Any) -> History:
    plan = {"zero": 3, "backend": "eager", "mesh": {"dp": 2}, **plan}
    world = torch.Size(plan["mesh"].values()).numel()
    return programs(model, zgraph.Plan(**plan), BATCH, world, machine(bandwidth))


def before(history: History) -> Program:
    names = [r.name for r in history.records]
    return history.after(names[names.index("defer_gradients") - 1])


def deferred(history: History) -> int:
    return {r.name: r.stats for r in history.records}["defer_gradients"]["deferred"]


def behind_the_table(program: Program) -> list[fx.Node]:
    """What is computed after the start of the reduction of the table's gradient."""
    nodes = program.nodes
    start = next(
        n for n in nodes if collectives.is_start(n) and info(n).role is Role.REDUCE and info(n).param == "table.weight"
    )
    return [n for n in nodes[nodes.index(start) :] if n.target in PRODUCTS]


MODELS = [(Tabled, {}), (Tabled, {"tied": True}), (Gated, {})]
PLANS: list[dict[str, Any]] = [
    {"zero": 0},
    {"zero": 1},
    {"zero": 2},
    {},
    {"precision": "bf16"},
    {"mesh": {"replicate": 2, "dp": 2}},
    {"micro_batches": 2},
    {"backend": "inductor"},
    {"mesh": {"dp": 2, "tp": 2}},
    {"wire": {"reduce": "int8"}},
]


@sweep("made_of, plan", [(m, p) for m in MODELS for p in PLANS], quick=4)
def test_numbers_stay_bit_for_bit_in_no_more_memory(made_of, plan):
    torch.manual_seed(0)
    model = made_of[0](**made_of[1])
    history = made(model, 2e8, **plan)
    whole, earlier = history.after("defer_gradients"), before(history)
    assert max(sum(m.values()) for m in memory_of(whole)) <= max(sum(m.values()) for m in memory_of(earlier))
    found, expected = outputs(whole), outputs(earlier)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@sweep("bandwidth", [1e8, 3e8, 1e9, 1e10], quick=2)
def test_the_reduction_of_a_table_has_products_beside_it(bandwidth):
    history = made(Tabled(), bandwidth)
    assert deferred(history) == len(behind_the_table(history.after("defer_gradients"))) > 0
    assert not behind_the_table(before(history))
    without = made(Tabled(), bandwidth, prefetch={"enabled": False})
    assert "defer_gradients" not in {r.name for r in without.records}


def test_a_step_ends_sooner(monkeypatch):
    seconds = []
    for most in (0, 64):
        monkeypatch.setattr("zgraph.passes.overlap.defer_gradients.MOST", most)
        history = made(Tabled(6), 1e7)
        assert (deferred(history) > 0) == (most > 0)
        seconds.append(simulate(history.program, costs=machine(1e7)).seconds)
    assert seconds[1] < 0.97 * seconds[0]


def test_only_what_nothing_else_reads_is_deferred():
    """Products that lead to the table's gradient, and whatever reads or writes anything else, stay."""
    program = made(Tabled(), 1e8).after("defer_gradients")
    at = {n: i for i, n in enumerate(program.nodes)}
    ends = {n for t in reductions_of(program) for n in t.nodes}
    for node in behind_the_table(program):
        reached = {node}
        for other in program.nodes[at[node] :]:
            if reached & set(other.all_input_nodes):
                reached.add(other)
        assert reached & ends
        params = {info(n).param for n in reached & ends}
        assert len(params) == 1 and "table.weight" not in params
    starts = [t.start for t in reductions_of(program)]
    assert all(at[a] < at[b] for a, b in pairwise(starts))


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"replicate": 2, "dp": 2}])
def test_another_programs_order_is_followed(mesh):
    """Ranks with other sizes defer the same gradients, whatever their own costs say."""
    slow = made(Tabled(6), 1e9, mesh=mesh)
    earlier = before(made(Tabled(6), 1e11, mesh=mesh))
    by_itself, following = copy.deepcopy(earlier), copy.deepcopy(earlier)
    PassManager([defer_gradients(DeferOptions(machine(1e11)))]).run(by_itself)
    PassManager([defer_gradients(DeferOptions(machine(1e11), order_of(slow.program)))]).run(following)

    def order(program):
        return [t.name for t in reductions_of(program)]

    assert order(following) == order(slow.after("defer_gradients")) != order(by_itself)

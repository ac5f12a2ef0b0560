"""A memory budget of a pipeline is each rank's, at every action of the schedule: forecast, measured, refused where it can't be held."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import models
import pytest
import refusals
import stage_models
import torch
from ranks import Ranks
from sweeps import sweep
from torch import nn

import zgraph
from zgraph import AdamW
from zgraph.build.pass_pipeline import costs_of
from zgraph.errors import PlanError, UnsupportedError
from zgraph.forecast.pipeline_plan import planned_stages
from zgraph.forecast.stages import PipelineForecast, forecast_of, forecast_pipeline, micro_batch
from zgraph.passes.remat.segments import chain_of
from zgraph.passes.remat.solver import Rotor, WaitingRotor
from zgraph.plan.plan import Plan
from zgraph.runtime import allocations
from zgraph.verification.virtual_stages import VirtualPipeline
from zgraph.verification.virtual_step import VirtualStep

HERE = {"activations": "none", "optimizer": "none", "parameters": "none"}
PARTS = 4  # micro-batches
SCALARS = 0.001  # of a peak: losses, counts and the like, of which a forecast says nothing


class Deep(nn.Module):
    """Blocks whose activations are much more than what comes into them."""

    def __init__(self, blocks: int = 4, dim: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Tanh()) for _ in range(blocks)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.pow(2).mean()


def deep() -> models.Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return models.Case(Deep(), (torch.randn(64, 16),))


def case_of(name: str) -> models.Case:
    if name == "deep":
        return deep()
    return stage_models.build(name) if name in stage_models.MODELS else models.build(name)


def plan_of(schedule: str = "1f1b", **more: Any) -> Plan:
    base: dict[str, Any] = {
        "mesh": {"pp": 2},
        "backend": "eager",
        "zero": 0,
        "hardware": "h100-80g",
        "partition": "uniform",
        "micro_batches": PARTS,
        "optimizer": AdamW(lr=1e-3),
        "offload": HERE,
    }
    return Plan(schedule=schedule, **base | more)


def forecast(case: models.Case, plan: Plan) -> PipelineForecast:
    return forecast_pipeline(case.model, plan, case.inputs, plan.usual_world())


@functools.cache
def ends(name: str, schedule: str) -> tuple[int, PipelineForecast]:
    """(the smallest budget, the forecast without one)."""
    least = refusals.smallest(lambda: forecast(case_of(name), plan_of(schedule, memory_budget=1)))
    return least, forecast(case_of(name), plan_of(schedule))


SCHEDULES = ["gpipe", "1f1b", "interleaved1f1b", "zb", "zbv"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.slow
def test_every_rank_stays_within_its_budget_and_less_memory_is_never_faster(schedule):
    least, free = ends("deep", schedule)
    assert least < free.worst.peak
    seconds = []
    for part in range(3):
        budget = least + (free.worst.peak - least) * part // 2
        found = forecast(deep(), plan_of(schedule, memory_budget=budget))
        assert max(rank.peak for rank in found.ranks) <= budget
        seconds.append(found.timeline.makespan)
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    assert seconds[-1] == pytest.approx(free.timeline.makespan)  # (nothing has to be done for it)


@sweep("name, schedule", [("gpt2", "zb"), ("Ladder", "gpipe"), ("Ladder", "1f1b"), ("Translator", "1f1b")], quick={2})
def test_the_smallest_budget_works_and_one_byte_less_does_not(name, schedule):
    least, _ = ends(name, schedule)
    found = forecast(case_of(name), plan_of(schedule, memory_budget=least))
    assert found.worst.peak <= least
    with pytest.raises(PlanError, match=f"the smallest that works is {least} bytes") as caught:
        forecast(case_of(name), plan_of(schedule, memory_budget=least - 1))
    assert caught.value.where == "memory_budget" and f"rank {found.worst.rank} of pp" in str(caught.value.why)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.slow
def test_gathered_weights_and_gradients_that_wait_count(zero):
    def at(budget: int | None) -> PipelineForecast:
        return forecast(deep(), plan_of(mesh={"pp": 2, "dp": 2}, zero=zero, memory_budget=budget))

    least = refusals.smallest(lambda: at(1))
    most = at(None).worst.peak
    for budget in (least, (least + most) // 2):
        assert max(rank.peak for rank in at(budget).ranks) <= budget


@pytest.mark.slow
def test_more_that_is_computed_again_is_taken_only_where_it_fits():
    """(Of this model it holds more at once: what it is computed from.)"""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        case = models.Case(Deep(4), (torch.randn(64, 16),))
    plan = plan_of(mesh={"pp": 2, "dp": 2}, zero=3, memory_budget=1)
    least = refusals.smallest(lambda: forecast(case, plan))
    found = forecast(case, plan.model_copy(update={"memory_budget": least}))
    assert max(rank.peak for rank in found.ranks) <= least


@pytest.mark.slow
def test_what_is_offloaded_makes_room_in_each_stage():
    away = {"activations": "cpu", "optimizer": "cpu", "parameters": "none", "least_bytes": 0}
    here, _ = ends("deep", "1f1b")
    plan = plan_of(offload=away, memory_budget=1)
    least = refusals.smallest(lambda: forecast(deep(), plan))
    assert least < here
    plan = plan.model_copy(update={"memory_budget": least})
    made = planned_stages(deep().model, plan, micro_batch(plan, deep().inputs), 2)
    assert forecast_of(made).worst.peak <= least
    assert all(step.states and step.states > 0 for step in made.steps)


@pytest.mark.slow
def test_the_first_stage_of_1f1b_has_more_computed_again_than_the_last():
    """Of the first more micro-batches are in flight."""
    least, _ = ends("deep", "1f1b")
    plan = plan_of(memory_budget=least + 10_000, mesh={"pp": 4}, optimizer=None)
    found = forecast(deep(), plan)
    assert [rank.peak <= least + 10_000 for rank in found.ranks] == [True] * 4
    assert found.stages[0].saved < found.stages[2].saved


# What is kept for those that wait.


def chain():
    plan = plan_of()
    made = planned_stages(Deep(8), plan, micro_batch(plan, deep().inputs), 2)
    return chain_of(made.steps[0].captured, costs_of(plan)).segments


def test_with_others_that_wait_less_is_kept_and_no_schedule_takes_less_than_one_for_itself():
    segments = chain()
    alone, few, many = Rotor(segments), WaitingRotor(segments, 1), WaitingRotor(segments, 8)
    for size in few.sizes():
        assert few.seconds(size) >= alone.seconds(size) - 1e-12
        assert many.seconds(size) >= few.seconds(size) - 1e-12
    assert many.seconds(many.bytes) == pytest.approx(alone.seconds(alone.bytes))
    sizes = many.sizes()
    assert all(many.seconds(a) > many.seconds(b) for a, b in itertools.pairwise(sizes))
    assert all(many.schedule(size) is not None for size in sizes)


# What runs.


def gradients(name: str, plan: Plan) -> dict[str, torch.Tensor]:
    """Those of a rank's own parameters after a step."""
    case = case_of(name)
    for module in case.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    zgraph.compile(case.model, plan, loss_fn=case.loss_fn)
    args, kwargs = (case.inputs, {}) if isinstance(case.inputs, tuple) else ((), case.inputs)
    case.model.train_step(*args, **kwargs)
    found = {n: p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for n, p in case.model.named_parameters()}
    return {n: g.detach().clone() for n, g in found.items() if g is not None}


def both(name: str, plan: Plan, budget: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(a rank's gradients without a budget, those with one)."""
    free = gradients(name, plan)
    return free, gradients(name, plan.model_copy(update={"memory_budget": budget}))


@pytest.mark.gloo
@pytest.mark.parametrize(
    "name, schedule",
    [("deep", "1f1b"), ("deep", "zbv"), ("gpt2", "zb"), ("gpt2", "gpipe"), ("Ladder", "1f1b")],
)
@pytest.mark.slow
def test_gradients_are_bit_for_bit_those_without_a_budget(two, name, schedule):
    plan = plan_of(schedule, optimizer=None, hardware=None)
    least = refusals.smallest(lambda: forecast(case_of(name), plan.model_copy(update={"memory_budget": 1})))
    for free, held in two.run(both, name, plan, least):
        assert free and free.keys() == held.keys()
        assert all(torch.equal(free[n], held[n]) for n in free)


def refused_and_then_not(plan: Plan) -> tuple[str, int]:
    """(what a rank is told of a budget of one byte; the smallest, which then works)."""
    model = deep().model
    with pytest.raises(PlanError) as caught:
        zgraph.compile(model, plan.model_copy(update={"memory_budget": 1}))
        model.train_step(*deep().inputs)
    least = int(str(caught.value).split("the smallest that works is ")[1].split(" bytes")[0])
    other = deep().model
    zgraph.compile(other, plan.model_copy(update={"memory_budget": least}))
    other.train_step(*deep().inputs)
    other.eval_step(*deep().inputs)
    other.zgraph.recompile(plan.model_copy(update={"memory_budget": 2 * least, "schedule": "gpipe"}))
    other.train_step(*deep().inputs)
    return str(caught.value), least


@pytest.mark.gloo
@pytest.mark.slow
def test_a_budget_that_is_too_small_is_refused_on_all_ranks_alike_and_the_one_named_works(two):
    plan = plan_of(hardware=None)
    (first, least), (second, _) = two.run(refused_and_then_not, plan)
    assert first == second and "of pp holds" in first
    assert least == refusals.smallest(
        lambda: forecast(deep(), plan.model_copy(update={"memory_budget": 1}))
    )  # (as the forecast says)


def wide() -> models.Case:
    """Deep enough that a step's scalars are nothing beside it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return models.Case(Deep(8, 64), (torch.randn(1024, 64),))


def measured(plan: Plan) -> int | None:
    """The most bytes that this rank's allocator holds in a step after the first; None where that can't be counted."""
    try:
        allocations.count()
    except UnsupportedError:
        return None
    before = allocations.live()
    case = wide()
    zgraph.compile(case.model, plan)
    for _ in range(2):
        case.model.train_step(*case.inputs)
        case.model.zero_grad()
    allocations.reset_peak()
    case.model.train_step(*case.inputs)
    return allocations.peak() - before


@pytest.mark.gloo
@pytest.mark.parametrize(
    "schedule, budgeted", [("gpipe", True), ("1f1b", True), ("1f1b", False), ("zb", True), ("zbv", False)]
)
@pytest.mark.slow
def test_ranks_are_counted_to_hold_what_the_forecast_says_and_so_their_budget(schedule, budgeted):
    plan = plan_of(schedule, hardware=None, micro_batches=8)
    if budgeted:
        least = refusals.smallest(lambda: forecast(wide(), plan.model_copy(update={"memory_budget": 1})))
        plan = plan.model_copy(update={"memory_budget": least})
    said = [rank.peak for rank in forecast(wide(), plan).ranks]
    with Ranks(2) as ranks:
        peaks = ranks.run(measured, plan)
    if None in peaks:
        pytest.skip("no C++ compiler")
    assert all(mine == pytest.approx(peak, rel=SCALARS) for mine, peak in zip(peaks, said, strict=True)), (peaks, said)
    assert plan.memory_budget is None or max(peaks) <= plan.memory_budget * (1 + SCALARS)


@pytest.mark.slow
def test_what_is_verified_are_the_programs_that_would_run():
    least, _ = ends("deep", "1f1b")
    case, plan = deep(), plan_of(memory_budget=least)
    assert zgraph.verify(case.model, plan, 2, case.inputs).ok
    step = VirtualStep(case.model, plan, 2, case.inputs, None)
    verified = VirtualPipeline(step).planned.steps
    run = planned_stages(case.model, plan, micro_batch(plan, case.inputs), 2).steps
    assert [made.choice for made in verified] == [made.choice for made in run]
    assert any(made.choice.activations is not None for made in verified)

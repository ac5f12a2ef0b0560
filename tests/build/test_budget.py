"""A memory budget: what fits is used for transfers in flight and for weights that are kept; what does not is refused."""

import dataclasses

import models
import pytest
import refusals
from sweeps import sweep

from zgraph import SGD, AdamW, Plan
from zgraph.build.planned_step import programs
from zgraph.errors import PlanError
from zgraph.passes.analysis.costs import CPU, Costs, Link
from zgraph.passes.analysis.parameter_collectives import gathers_of
from zgraph.passes.analysis.simulator import simulate
from zgraph.passes.manager import History
from zgraph.program.node import Phase, info

WORLD = 2
COSTS = Costs(CPU.model_copy(update={"links": {"*": Link(bandwidth=1e8, latency=1e-5)}}), fused=False)


@pytest.fixture(scope="module")
def case():
    return models.stack(5, dim=64)


_RUNS: dict[str, History] = {}


def run(case, **fields) -> History:
    """The module's case by a plan of these fields: each is compiled once."""
    key = repr(sorted(fields.items()))
    if key not in _RUNS:
        plan = Plan(zero=3, backend="eager", mesh={"dp": WORLD}, **fields)
        _RUNS[key] = programs(case.model, plan, case.inputs, WORLD, COSTS)
    return _RUNS[key]


def peak(history) -> int:
    return sum(simulate(history.program, COSTS).peak.values())


def regathered(history) -> list[str]:
    return [
        g.name for g in gathers_of(history.program) if info(g.start).phase is Phase.BACKWARD or "_again" in g.start.name
    ]


_SMALLEST: dict[str, int] = {}


def smallest(case, **fields) -> int:
    """The smallest budget of the module's case by a plan of these fields: each is searched for once."""
    key = repr(sorted(fields.items()))
    if key not in _SMALLEST:
        _SMALLEST[key] = refusals.smallest(lambda: run(case, memory_budget=1, **fields))
    return _SMALLEST[key]


def test_without_a_budget_only_what_the_turn_uses_is_held(case):
    history = run(case)
    held = next(r.stats["held"] for r in history.records if r.name == "regather")
    assert held <= 2 and len(regathered(history)) >= 6


def test_a_budget_that_is_too_small_states_the_smallest_that_works(case):
    least = smallest(case)
    assert peak(run(case, memory_budget=least)) <= least
    with pytest.raises(PlanError, match="memory_budget"):
        run(case, memory_budget=least - 1)


@sweep("extra", [0, 20_000, 50_000, 10**7], quick=(1,))
def test_the_peak_never_exceeds_the_budget(case, extra):
    budget = smallest(case) + extra
    assert peak(run(case, memory_budget=budget)) <= budget


@pytest.mark.slow
def test_more_memory_keeps_more_weights_until_none_is_gathered_twice(case):
    least = smallest(case)
    counts = [len(regathered(run(case, memory_budget=least + extra))) for extra in (0, 40_000, 80_000, 10**7)]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1] == 0


@pytest.mark.slow
def test_a_larger_budget_is_never_slower(case):
    least = smallest(case)
    seconds = [simulate(run(case, memory_budget=least + e).program, COSTS).seconds for e in (0, 30_000, 10**7)]
    assert seconds == sorted(seconds, reverse=True)


def test_what_could_not_be_kept_is_a_remark_with_its_remedy(case):
    history = run(case, memory_budget=smallest(case))
    remark = next(r for r in history.program.remarks if r.made_by == "regather")
    assert "gathered again" in remark.what and remark.seconds > 0
    budget = int(remark.remedy.split("memory_budget=")[1].split()[0])
    again = run(case, memory_budget=budget)  # (which may find a better use for the room)
    assert simulate(again.program, COSTS).seconds < simulate(history.program, COSTS).seconds


def test_optimizer_states_and_waiting_gradients_count(case):
    plain, heavy = smallest(case, optimizer=SGD(lr=0.1)), smallest(case, optimizer=AdamW(lr=0.1))
    shards = sum(s.numel * 4 // WORLD for s in run(case).program.params.values())
    assert heavy - plain == pytest.approx(2 * shards, rel=0.05)
    assert smallest(case, micro_batches=2) - smallest(case) == pytest.approx(shards, rel=0.05)


@pytest.mark.slow
def test_what_costs_most_time_per_byte_is_kept_first(case):
    """With a latency that outweighs the bytes of small weights, biases go before matrices."""
    slow = dataclasses.replace(
        COSTS, hardware=CPU.model_copy(update={"links": {"*": Link(bandwidth=1e8, latency=1e-3)}})
    )
    plan = Plan(zero=3, backend="eager", mesh={"dp": WORLD}, memory_budget=smallest(case) + 6_000)
    again = regathered(programs(case.model, plan, case.inputs, WORLD, slow))
    assert again and not any(name.endswith("bias") for name in again)

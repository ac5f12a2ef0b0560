"""When transfers start and are waited for: within the bounds, to the same numbers, and never slower than one by one."""

from __future__ import annotations

import gc
from typing import Any

import models
import pytest
import torch
from gathered import alive, bytes_of, gathers
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import ALONE, Case, cases, outputs, tables
from ranks import Ranks
from sweeps import sweep

import zgraph
from zgraph.build.planned_step import programs
from zgraph.codegen.partition import split
from zgraph.errors import PlanError
from zgraph.passes import verify_program
from zgraph.passes.analysis.costs import Costs, Hardware, Link
from zgraph.passes.analysis.live_memory import memory_of
from zgraph.passes.analysis.parameter_collectives import layers_of
from zgraph.passes.analysis.simulator import simulate
from zgraph.passes.manager import History
from zgraph.program import collectives
from zgraph.program.node import Phase, Role, info
from zgraph.program.program import OutputRole, Program

pytestmark = pytest.mark.core


LAYER = sum(4 * p.numel() for p in models.stack(1, dim=8).model.parameters())


def stats_of(history: History) -> dict[str, int]:
    return dict({r.name: r.stats for r in history.records}["overlap"])


def starts(program: Program, role: Role) -> list:
    return [n for n in program.nodes if collectives.is_start(n) and info(n).role is role]


def machine(bandwidth: float = 1e7, **changes: Any) -> Costs:
    """A thousand FLOP a microsecond and, by default, ten bytes a microsecond between ranks; memory costs nothing."""
    values: dict[str, Any] = {"name": "test", "flops": {"float32": 1e9}, "memory": 1e30, "capacity": 1, "host": 1.0}
    values["links"] = {"*": Link(bandwidth=bandwidth)}
    return Costs(Hardware(**{**values, **changes}))


def scheduled(depth: int = 6, costs: Costs | None = None, world: int = 4, **plan: Any) -> History:
    """A stack of equal layers at stage 3."""
    case = models.stack(depth, dim=8)
    plan = {"zero": 3, "backend": "eager", "mesh": {"dp": world}, **plan}
    return programs(case.model, zgraph.Plan(**plan), case.inputs, world, costs or machine())


# -- any network ----------------------------------------------------------------------------------------------------------
def operators(program: Program) -> list[int]:
    """Positions of what computes; all else is transfers and what serves them."""
    aside = (Role.GATHER, Role.REDUCE, Role.WAIT, Role.LAYOUT, Role.RELEASE)
    return [i for i, n in enumerate(program.nodes) if n.op == "call_function" and info(n).role not in aside]


Span = tuple[int, int, int]  # from a position to another one, so many bytes


def held(spans: list[Span], at: int) -> int:
    return sum(size for first, end, size in spans if first < at < end)


def gathered_ahead(program: Program) -> list[Span]:
    """From the start of a gather to its wait."""
    at = {n: i for i, n in enumerate(program.nodes)}
    results = set(program.output_values())
    return [(at[s], at[w], bytes_of(s)) for s in gathers(program) for w in s.users if not {w, *w.users} & results]


def gradients_waiting(program: Program) -> tuple[list[Span], list[Span]]:
    """From where a gradient is there, in the backward, to the wait of its reduce-scatter; and to where its bucket is whole."""
    at = {n: i for i, n in enumerate(program.nodes)}
    turn = max((i for i in operators(program) if info(program.nodes[i]).phase is Phase.FORWARD), default=-1)
    waiting, buckets = [], {}
    for start in starts(program, Role.REDUCE):
        if start.target is collectives.REDUCE_SCATTER:
            source = operand = start.all_input_nodes[0]
            while source.op == "call_function" and info(source).role is Role.LAYOUT:
                source = source.all_input_nodes[0]
            size = operand.meta["val"].numel() * operand.meta["val"].element_size()
            waiting.append((max(at[source], turn), at[collectives.wait_of(start)], size))
            buckets.setdefault(info(start).bucket or start, []).append((max(at[source], turn), size))
    parts = [(first, max(f for f, _ in members) + 1, size) for members in buckets.values() for first, size in members]
    return waiting, parts


sizes = st.sampled_from([None, 0, 100, 1000, 10**6])


@st.composite
def knobs(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "bucket": {"gather": draw(sizes), "reduce": draw(sizes)},
        "extra": draw(st.sampled_from([None, 0, 1, 300, 2000, 10**6])),  # bytes beyond what is needed at once
        "spare_bytes": draw(st.sampled_from([None, 0, 300, 10**6])),
        "ahead_bytes": draw(st.sampled_from([None, 0, 300, 2000])),
        "reduce_bytes": draw(st.sampled_from([None, 0, 300, 2000])),
        "reuse_bytes": draw(st.sampled_from([None, 0, 300])),
    }


@settings(max_examples=4, deadline=None, derandomize=True)
@given(case=cases(), chosen=st.lists(st.tuples(knobs(), tables()), min_size=2, max_size=2))
def test_any_schedule_keeps_the_bounds_and_the_numbers_and_is_no_slower(
    case: Case, chosen: list[tuple[dict[str, Any], Costs]]
) -> None:
    plain = case.plain()
    captured, expected = plain.records[0].program, outputs(plain.program)
    for drawn, costs in chosen:
        only_at_3 = ("extra", "spare_bytes", "ahead_bytes", "reuse_bytes")
        knob = {k: None if k in only_at_3 and case.plan["zero"] < 3 else v for k, v in drawn.items()}
        reuse = {"reuse_bytes": knob["reuse_bytes"]}
        off = case.scheduled(captured, costs, bucket=knob["bucket"], prefetch={"enabled": False, **reuse})
        needed = max(alive(off.program))
        cap = None if knob["extra"] is None else needed + knob["extra"]
        bounds = {k: knob[k] for k in ("ahead_bytes", "reduce_bytes", "spare_bytes")}
        on = case.scheduled(captured, costs, bucket=knob["bucket"], prefetch={"max_bytes": cap, **bounds, **reuse})
        program, stats = on.program, stats_of(on)

        assert max(alive(program)) == stats["gathered_bytes"] <= stats["cap_bytes"]
        assert cap is None or stats["cap_bytes"] == cap
        if knob["ahead_bytes"] is not None and case.plan["zero"] == 3:
            spans = gathered_ahead(program)
            assert all(held(spans, i) <= knob["ahead_bytes"] for i in operators(program))
        if knob["reduce_bytes"] is not None:
            waiting, parts = gradients_waiting(program)
            assert all(held(waiting, i) <= max(knob["reduce_bytes"], held(parts, i)) for i in operators(program))

        found = outputs(program)
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[at], value) for at, value in expected.items())

        forecast = simulate(program, costs), simulate(off.program, costs)
        assert forecast[0].seconds <= forecast[1].seconds * (1 + 1e-9)

        parts = split(program)
        for part in (*parts.ahead, parts.forward, parts.backward):
            if part is not None:
                verify_program(part)


# -- the cap ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bucket", [None, 0])
def test_a_cap_below_what_is_needed_at_once_is_refused_with_the_smallest_that_works(bucket):
    sizes = {"gather": bucket, "reduce": bucket}
    needed = max(alive(scheduled(bucket=sizes, prefetch={"enabled": False}).program))
    with pytest.raises(PlanError) as caught:
        scheduled(bucket=sizes, prefetch={"max_bytes": needed - 1})
    assert caught.value.where == "prefetch.max_bytes"
    assert f"smallest that works is {needed} bytes" in str(caught.value)
    assert "needs" in str(caught.value.why) and "layers." in str(caught.value.why), "it names what is needed at once"
    history = scheduled(bucket=sizes, prefetch={"max_bytes": needed})
    assert max(alive(history.program)) == needed


def test_smaller_buckets_work_within_smaller_caps():
    needed = [
        max(alive(scheduled(bucket={"gather": b, "reduce": b}, prefetch={"enabled": False}).program))
        for b in (0, 10**6)
    ]
    assert needed[0] < needed[1]
    scheduled(bucket={"gather": 0}, prefetch={"max_bytes": needed[0]})
    with pytest.raises(PlanError, match="smaller buckets may need less"):
        scheduled(bucket={"gather": 10**6}, prefetch={"max_bytes": needed[0]})


def test_the_default_cap_is_what_is_needed_at_once_and_two_layers():
    off, on = scheduled(prefetch={"enabled": False}), scheduled()
    assert stats_of(on)["cap_bytes"] == max(alive(off.program)) + 2 * LAYER


@sweep("bandwidth", [1e7, 1e12], quick=1, ids=["slow", "fast"])
def test_what_is_gathered_early_raises_the_peak_by_no_more_than_the_spare_bytes(bandwidth):
    """Nor do gradients that wait, if no bound of their own is asked for."""
    costs = machine(bandwidth)

    def peak(**prefetch: Any) -> int:
        history = scheduled(costs=costs, prefetch=prefetch)
        return max(sum(m.values()) for m in memory_of(history.program))

    least = peak(enabled=False)
    for spare in (0, 100, 1000, 5000):
        assert least <= peak(spare_bytes=spare) <= least + spare
    assert peak(max_bytes=10**9) >= peak(spare_bytes=0)


def test_a_link_with_time_to_spare_takes_no_memory():
    def gathered(bandwidth: float) -> int:
        costs = machine(bandwidth, flops={"float32": 1e5})  # (an operator takes milliseconds)
        return max(alive(scheduled(costs=costs).program))

    assert gathered(1e12) < gathered(1e4)


def test_a_wider_cap_exposes_no_more():
    needed = max(alive(scheduled(prefetch={"enabled": False}).program))
    exposed = []
    for layers in (0, 1, 2, 4, 8):
        program = scheduled(prefetch={"max_bytes": needed + layers * 1300}).program
        exposed.append(sum(simulate(program, machine()).exposed.values()))
    assert exposed == sorted(exposed, reverse=True) and exposed[-1] < exposed[0]


# -- what overlaps --------------------------------------------------------------------------------------------------------
def test_without_prefetch_each_transfer_is_waited_for_where_it_starts():
    program = scheduled(prefetch={"enabled": False}, bucket={"gather": 0, "reduce": 0}).program
    for start in starts(program, Role.GATHER) + starts(program, Role.REDUCE):
        assert collectives.is_wait(start.next) and start.next.args[0] is start
    assert stats_of(scheduled(prefetch={"enabled": False}))["early"] == 0


def test_a_gather_runs_beside_what_is_computed_before_its_first_use():
    """On a link that carries a layer while one is computed, nothing but the first is waited for, if there is room for a layer."""
    costs = machine(bandwidth=1e8)
    forecast = {
        on: simulate(scheduled(costs=costs, prefetch={"enabled": on, "spare_bytes": LAYER}).program, costs)
        for on in (False, True)
    }
    layers = 6
    alone = forecast[False].exposed["gather"] / (2 * layers - 1)
    assert forecast[True].exposed["gather"] <= 1.01 * alone
    assert forecast[True].exposed["reduce"] < 0.2 * forecast[False].exposed["reduce"]
    assert forecast[True].busy == pytest.approx(forecast[False].busy)


def test_a_faster_link_exposes_no_more():
    exposed = []
    for exponent in range(4, 13, 2):
        costs = machine(bandwidth=10.0**exponent)
        exposed.append(sum(simulate(scheduled(costs=costs).program, costs).exposed.values()))
    assert exposed == sorted(exposed, reverse=True)


def test_computation_keeps_its_order():
    for plan in ({}, ALONE):
        history = scheduled(**plan)
        before, after = history.after("bucket"), history.after("overlap")
        products = [[n.name for n in p.nodes if "mm" in str(n.target)] for p in (before, after)]
        assert products[0] == products[1]


def test_all_ranks_have_one_schedule():
    """It is decided from the table of costs alone."""
    assert [n.name for n in scheduled().program.nodes] == [n.name for n in scheduled().program.nodes]


# -- across the turn --------------------------------------------------------------------------------------------------------
def test_the_first_gathers_of_the_backward_start_in_the_forward():
    history = scheduled(prefetch={"spare_bytes": LAYER})
    parts = split(history.program)
    saved = {p.name for p in parts.forward.outputs if p.role is OutputRole.SAVED}
    flying = [n for n in gathers(parts.forward) if n.name in saved]
    assert flying and stats_of(history)["across_forward_backward"] == len(flying)
    assert all(not any(collectives.is_wait(u) for u in n.users) for n in flying)
    came = [n for n in parts.backward.placeholders() if info(n).role is Role.GATHER]
    assert sorted(n.name for n in came) == sorted(n.name for n in flying)
    assert all([collectives.is_wait(u) for u in n.users] == [True] for n in came)
    order = [info(n).param for n in came]
    assert {layers_of(history.program)[p] for p in order} <= {"layers.5", "layers.4", "layers.3"}


def test_no_reduction_starts_in_the_forward():
    """Not of a gradient that the forward has made, nor of one that comes into the backward as it is."""
    for name in ("gradient_of_forward", "shared_gradient"):
        case = models.build(name)
        for bucket in (0, None):
            plan = zgraph.Plan(zero=3, backend="eager", bucket={"gather": bucket, "reduce": bucket})
            parts = split(programs(case.model, plan, case.inputs, 2).program)
            assert not starts(parts.forward, Role.REDUCE)
            assert len(starts(parts.backward, Role.REDUCE)) == len(list(case.model.parameters()))


class Shift(torch.nn.Module):
    """Its second gradient is the tangent itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 3))
        self.shift = torch.nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        return torch.tanh(x @ self.weight) + self.shift


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_gradient_that_is_the_tangent_is_reduced_in_the_backward(zero):
    plan = zgraph.Plan(zero=zero, backend="eager", bucket={"gather": 0, "reduce": 0})
    program = programs(Shift(), plan, (torch.randn(4, 3),), 2).program
    assert all(info(n).phase is Phase.BACKWARD for n in starts(program, Role.REDUCE))


def with_both(backend: str, plan: dict[str, Any]) -> tuple[list[torch.Tensor], int]:
    """On a rank: losses and gradients of three steps, and how many gathers a forward leaves on their way."""
    import torch.distributed as dist

    case = models.stack(3, dim=8)
    model = zgraph.compile(case.model, zgraph.Plan(zero=3, backend=backend, **plan))
    mine = tuple(x.chunk(dist.get_world_size())[dist.get_rank()] for x in case.inputs)
    found = []
    for _ in range(3):
        loss = model(*mine)
        loss.backward()
        found.append(loss.detach())
        for p in model.parameters():
            found.append(p.grad.full_tensor())
            with torch.no_grad():
                p -= 0.1 * p.grad
            p.grad = None
    return found, len(model.zgraph.programs["train0"].forward().flying)


def compare(backend: str) -> None:
    """On a rank: whatever the schedule, the numbers are those of transfers one by one."""
    plain, none = with_both(backend, ALONE)
    assert none == 0
    for bucket in (None, 0):
        found, flying = with_both(backend, {"bucket": {"gather": bucket, "reduce": bucket}})
        assert flying > 0
        for mine, expected in zip(found, plain, strict=True):
            if backend == "eager":
                assert torch.equal(mine, expected)
            else:
                torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-7)


def a_forward_alone() -> list[int]:
    """On a rank: transfers that torch holds before a forward, after it, and once its result is gone."""
    from torch._C._distributed_c10d import _get_work_registry_size

    gc.collect()
    start = _get_work_registry_size()  # (of tests before, on these ranks)
    case = models.stack(3, dim=8)
    model = zgraph.compile(case.model, zgraph.Plan(zero=3, backend="eager"), inputs=case.inputs)
    found = [_get_work_registry_size()]
    loss = model(*case.inputs)
    found.append(_get_work_registry_size())
    del loss
    gc.collect()
    return [size - start for size in (*found, _get_work_registry_size())]


@pytest.mark.gloo
@pytest.mark.parametrize("backend", [pytest.param("inductor", marks=pytest.mark.inductor), "eager"])
@pytest.mark.slow
def test_two_ranks_compute_the_same_numbers_with_transfers_across_the_turn(two: Ranks, backend: str) -> None:
    two.run(compare, backend)


@pytest.mark.gloo
def test_a_forward_whose_backward_never_runs_leaves_nothing_in_flight(two: Ranks) -> None:
    for before, between, after in two.run(a_forward_alone):
        assert before == 0 and between > 0 and after == 0


# -- remarks ----------------------------------------------------------------------------------------------------------------
def stalls_for_the_cap(history: History) -> list:
    return [r for r in history.program.remarks if "prefetch.max_bytes=" in r.remedy]


def test_a_gather_that_stalls_because_of_the_cap_says_so_and_how_to_mend_it():
    costs = machine(bandwidth=1e8)
    needed = max(alive(scheduled(costs=costs, prefetch={"enabled": False}).program))
    history = scheduled(costs=costs, prefetch={"max_bytes": needed})
    missed = stalls_for_the_cap(history)
    assert missed
    forecast = simulate(history.program, costs)
    waits = {s.node: s.seconds for s in forecast.stalls}
    for remark in missed:
        assert remark.made_by == "overlap" and remark.what.startswith("gather of layers.")
        assert "not hoisted above" in remark.why and "gathered bytes would reach" in remark.why
        start = next(n for n in history.program.nodes if n.name == remark.node)
        assert remark.seconds == pytest.approx(waits[collectives.wait_of(start).name])
        assert f"+{remark.seconds * 1e3:.3g} ms a step" in str(remark) and remark.remedy in str(remark)


def test_following_the_remedies_removes_the_stalls():
    costs = machine(bandwidth=1e8)
    cap = max(alive(scheduled(costs=costs, prefetch={"enabled": False}).program))
    caps = [cap]
    while missed := stalls_for_the_cap(scheduled(costs=costs, prefetch={"max_bytes": cap})):
        cap = max(int(r.remedy.partition("=")[2]) for r in missed)
        assert cap > caps[-1], "each remedy is a wider cap"
        caps.append(cap)
        assert len(caps) < 10
    assert len(caps) > 1


def test_without_prefetch_each_remark_says_to_switch_it_on():
    remarks = scheduled(prefetch={"enabled": False}).program.remarks
    assert remarks and {(r.why, r.remedy) for r in remarks} == {("prefetch is off", "prefetch.enabled=True")}


def test_on_a_link_that_costs_nothing_nothing_is_remarked():
    assert not scheduled(costs=machine(bandwidth=1e30)).program.remarks


def test_gradients_that_wait_too_long_for_their_cap_are_remarked():
    history = scheduled(prefetch={"reduce_bytes": 0})
    found = [r for r in history.program.remarks if r.remedy.startswith("prefetch.reduce_bytes=")]
    assert found and all("gradients that wait to be scattered would reach" in r.why for r in found)
    generous = scheduled(prefetch={"reduce_bytes": 10**9})
    assert not [r for r in generous.program.remarks if r.remedy.startswith("prefetch.reduce_bytes=")]

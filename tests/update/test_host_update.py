"""Updates of what lies elsewhere than on an accelerator: computed on the host, bit for bit those of the device.

The accelerator is a pretended one: programs are built for it, their devices are checked, and they run on virtual ranks.
"""

from __future__ import annotations

import pytest
import torch
from sweeps import in_turn, product, sweep
from test_update_programs import Virtual, gradients, parameters
from torch import fx, nn

import zgraph
from zgraph.build.update_program import whole_update
from zgraph.parameters.layout import planned_layout
from zgraph.passes import verify_program
from zgraph.passes.analysis.costs import H100, Costs
from zgraph.passes.analysis.live_memory import memory_of
from zgraph.passes.analysis.simulator import simulate
from zgraph.passes.update.group_updates import groups_of
from zgraph.plan.offloading import KINDS
from zgraph.program import collectives, transfers_to_host
from zgraph.program.node import info, tensors
from zgraph.program.program import Program

HERE, THERE = torch.device("cpu"), torch.device("cuda:0")
RECORDS = {
    "AdamW": zgraph.AdamW(lr=1e-2, amsgrad=True),
    "AdamW8bit": zgraph.AdamW8bit(lr=1e-2),
    "SGD": zgraph.SGD(lr=0.1, momentum=0.9),
    "Adagrad": zgraph.Adagrad(lr=0.1),
    "Lion": zgraph.Lion(lr=1e-3),
    "LAMB": zgraph.LAMB(lr=1e-2),
    "Muon": zgraph.Muon(lr=1e-2),
}
MORE = {
    "fp32": {},
    "clipped": {"grad_clip": 0.5, "ema": 0.9},
    "bf16": {"precision": "bf16", "grad_clip": 0.5},
    "fp16": {"precision": "fp16", "ema": 0.9},
}


def plan_of(record, tier: str, kinds=("optimizer",), zero: int = 3, away: dict | None = None, **more) -> zgraph.Plan:
    place = "nvme:/nowhere" if tier == "nvme" else tier
    offload = {**dict.fromkeys(kinds, place), "least_bytes": 1, "sub_group_bytes": 1, **(away or {})}
    return zgraph.Plan(zero=zero, backend="eager", optimizer=record, offload=offload, **more)


def built(plan: zgraph.Plan, world: int, device: torch.device = THERE) -> Program:
    model, sizes = parameters(), plan.resolve_mesh(world)
    history = whole_update(model, planned_layout(model, sizes, plan), plan, sizes, device)
    assert history is not None
    return history.program


def here(program: Program) -> Program:
    """The same program for tensors of this machine."""

    def moved(leaf):
        return HERE if isinstance(leaf, torch.device) else leaf

    for node in program.graph.nodes:
        node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), moved)
    return program


def devices_of(node: fx.Node) -> set[str]:
    return {t.device.type for a in (node, *node.all_input_nodes) for t in tensors(a)}


def check_places(program: Program) -> None:
    """Each operator runs where its operands are; nothing of a disk is read but by its fetch."""
    verify_program(program)
    held = set(program.placeholders())
    for nodes in groups_of(program):  # (each runs as one)
        held.update(nodes)
        assert all(a in held or a.op == "get_attr" for n in nodes for a in n.all_input_nodes)
    for node in program.graph.nodes:
        if node.op == "call_function" and not transfers_to_host.is_host_transfer(node):
            assert len(devices_of(node)) == 1, f"{node.format_node()} mixes {devices_of(node)}"
            assert all(info(a).home != "nvme" for a in node.all_input_nodes)
        if collectives.is_start(node):
            assert devices_of(node) == {"cuda"}


def stepped(program: Program, plan: zgraph.Plan, world: int) -> Virtual:
    mine = Virtual(plan.model_copy(update={"offload": zgraph.Plan().offload}), world)
    mine.program = here(program)
    for grads in gradients(parameters(), 3):
        mine.step({n: g.to(mine.specs[n].grad_dtype) for n, g in grads.items()})
    return mine


def same(one: Virtual, other: Virtual) -> bool:
    return all(
        torch.equal(a[key].nan_to_num(-1.0), b[key].nan_to_num(-1.0))
        for a, b in zip(one.ranks, other.ranks, strict=True)
        for key in a
    )


@sweep("name, more, tier", [(n, *rest) for n in RECORDS for rest in in_turn([*MORE], ["cpu", "nvme"])], quick=1)
def test_updates_on_the_host_are_those_of_the_device(name, more, tier):
    plan = plan_of(RECORDS[name], tier, **MORE[more])
    program = built(plan, 1)
    check_places(program)
    assert any(
        info(n).home == "cpu" and not transfers_to_host.is_host_transfer(n)
        for n in program.graph.nodes
        if n.op == "call_function"
    )
    kept = zgraph.Plan(zero=3, backend="eager", optimizer=RECORDS[name], **MORE[more])
    assert same(stepped(program, plan, 1), stepped(built(kept, 1), kept, 1))


@product("at, kinds", [(1, "cpu"), (2, "nvme"), (3, "cpu")], [("optimizer",), ("parameters",), KINDS], together=1)
@sweep("name", ["AdamW", "LAMB", "Muon"], quick=1)
def test_likewise_at_other_worlds_and_for_parameters(name, at, kinds):
    """An update that communicates does it on the device, whatever of it lies elsewhere."""
    world, tier = at
    more = {"grad_clip": 0.5, "precision": "bf16"}
    plan = plan_of(RECORDS[name], tier, kinds, **more)
    program = built(plan, world)
    check_places(program)
    kept = zgraph.Plan(zero=3, backend="eager", optimizer=RECORDS[name], **more)
    assert same(stepped(program, plan, world), stepped(built(kept, world), kept, world))


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.7, 1.0])
def test_a_share_stays_on_the_device_and_is_updated_there(ratio):
    plan = plan_of(RECORDS["AdamW"], "cpu", away={"ratio": ratio})
    program = built(plan, 1)
    check_places(program)
    where = {
        "cpu" if info(n).home else "cuda" for n in program.graph.nodes if n.op == "call_function" and info(n).param
    }
    assert where == ({"cuda"} if ratio == 0 else {"cpu", "cuda"})  # (new weights arrive on the device)
    kept = zgraph.Plan(zero=3, backend="eager", optimizer=RECORDS["AdamW"])
    assert same(stepped(program, plan, 1), stepped(built(kept, 1), kept, 1))


def test_what_a_group_on_the_host_waits_for_was_begun_before_it():
    """Weights come in ahead and numbers late: the waits for both are one group."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(40)))
    plan = plan_of(RECORDS["AdamW"], "cpu", zero=0, away={"update_on": "host", "sub_group_bytes": None})
    check_places(whole_update(model, planned_layout(model, {"dp": 1}, plan), plan, {"dp": 1}, THERE).program)


def test_parameters_of_one_shape_stay_apart_where_some_are_elsewhere():
    """No parameter whose states are on the device is updated on the host, however groups are made."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    plan = plan_of(RECORDS["AdamW"], "cpu", away={"ratio": 0.5, "sub_group_bytes": None})
    program = whole_update(model, planned_layout(model, {"dp": 1}, plan), plan, {"dp": 1}, THERE).program
    check_places(program)
    homes = {p.name.partition("/")[0] for p, n in program.input_items() if info(n).home}
    on_host = {info(n).param for n in program.graph.nodes if n.op == "call_function" and info(n).home}
    assert homes and len(homes) < 12 and on_host - {None} == homes


def test_states_in_the_hosts_memory_and_gradients_that_came_there_do_not_move():
    plan = plan_of(RECORDS["SGD"], "cpu")
    program = built(plan, 1)
    sizes = [p.nbytes for p in parameters().parameters()]
    moved = simulate(program, Costs(H100)).moved
    numbers = moved["d2h"] - sum(sizes)  # (weights, which are float32 here)
    assert 0 <= numbers <= 200 and moved["h2d"] == sum(sizes)
    on_disk = simulate(built(plan_of(RECORDS["SGD"], "nvme"), 1), Costs(H100)).moved
    assert on_disk["nvme read"] == on_disk["nvme write"] == sum(sizes)
    assert on_disk["h2d"] == moved["h2d"]


def test_with_a_device_that_is_the_host_nothing_moves_that_lies_in_its_memory():
    program = built(plan_of(RECORDS["AdamW"], "cpu"), 1, HERE)
    assert not any(transfers_to_host.is_host_transfer(n) for n in program.graph.nodes)
    on_device = built(plan_of(RECORDS["AdamW"], "cpu", away={"update_on": "device"}), 1, HERE)
    assert any(transfers_to_host.is_host_transfer(n) for n in on_device.graph.nodes)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_on_the_device_if_the_plan_says_so(tier):
    plan = plan_of(RECORDS["AdamW"], tier, away={"update_on": "device"}, grad_clip=0.5)
    program = built(plan, 1)
    check_places(program)
    assert not any(
        info(n).home and not transfers_to_host.is_host_transfer(n)
        for n in program.graph.nodes
        if n.op == "call_function"
    )
    kept = zgraph.Plan(zero=3, backend="eager", optimizer=RECORDS["AdamW"], grad_clip=0.5)
    assert same(stepped(program, plan, 1), stepped(built(kept, 1), kept, 1))


def test_what_is_on_the_host_takes_no_memory_of_the_device():
    peaks = {}
    for on in ("host", "device"):
        plan = plan_of(RECORDS["AdamW"], "cpu", away={"update_on": on, "sub_group_bytes": 2**20})
        peaks[on] = max(memory_of(built(plan, 1)), key=lambda at: sum(at.values()))
    assert sum(peaks["host"].values()) < sum(peaks["device"].values())
    assert peaks["host"].get("fetched", 0) <= sum(p.nbytes for p in parameters().parameters())


def test_the_forecast_counts_the_hosts_time():
    """The slower the host, and the more is updated there, the longer."""

    def seconds(rate: float, ratio: float) -> float:
        plan = plan_of(RECORDS["AdamW"], "cpu", away={"ratio": ratio})
        return simulate(built(plan, 1), Costs(H100.model_copy(update={"host_memory": rate, "launch": 0.0}))).seconds

    assert seconds(1e6, 1.0) > 2 * seconds(2.5e6, 1.0)
    assert seconds(1e6, 1.0) > seconds(1e6, 0.5) > seconds(1e6, 0.0)


def test_groups_wait_for_what_they_need_and_no_longer():
    """While a group is computed, what the next one needs comes, and what the last one made goes."""
    program = built(plan_of(RECORDS["AdamW"], "nvme"), 1)
    order = {n: i for i, n in enumerate(program.graph.nodes)}
    fetched = [n for n in program.graph.nodes if n.target is transfers_to_host.FETCH and info(n).home == "cpu"]
    ahead = 0
    for start in fetched:
        (wait,) = [u for u in start.users if transfers_to_host.is_wait(u)]
        between = [n for n in program.graph.nodes if order[start] < order[n] < order[wait]]
        assert info(start).group != info(wait).group  # (else they would be one piece of code)
        ahead += any(n.op == "call_function" and not transfers_to_host.is_host_transfer(n) for n in between)
    assert ahead >= len(fetched) // 2

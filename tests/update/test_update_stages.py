"""Updates of the stages of a pipeline, each a program of its own, do together what torch does to all parameters in one process.

Functions at the top of this file run on real ranks over gloo; each returns what the test compares.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from sweeps import sweep
from torch import nn
from torch.nn.utils import clip_grad_norm_

import zgraph
from zgraph.build.pass_pipeline import build_update_passes
from zgraph.build.update_program import state_bytes, update_history, update_options, whole_update
from zgraph.codegen.eager import compile_eager
from zgraph.codegen.inductor import launches
from zgraph.codegen.update_chunks import compile_chunk, compile_chunks
from zgraph.errors import MeshError, PlanError, RankMismatchError, VerifyError
from zgraph.parameters.layout import layout
from zgraph.passes import History, PassManager, verify_program
from zgraph.passes.analysis.costs import CPU, Costs, Hardware, Link
from zgraph.passes.analysis.simulator import simulate
from zgraph.plan.loss_scaling import LossScale
from zgraph.program import collectives
from zgraph.program.groups import part_of, positions_of
from zgraph.program.node import NodeInfo, Phase, Role, info, set_info
from zgraph.program.printer import render
from zgraph.program.program import InputRole, OutputRole, ParamSpec, Port, Program
from zgraph.program.serialize import from_json, to_json
from zgraph.update import scaler
from zgraph.update.build_update import UpdateOptions, scalar_names, states_of
from zgraph.update.optimizer import PlanOptimizer
from zgraph.update.owned_parameters import OwnedParameters, held_at, mesh_of, specs_here
from zgraph.update.parameter_groups import Member, members_of
from zgraph.update.shared_collectives import check_collective_order, shared_collectives
from zgraph.verification.virtual_ranks import coordinates, group_ranks, run_virtual

ROUNDING = 1e-6  # a norm summed in another order, in float32 (6e-8 a number)
CPU_DEVICE = torch.device("cpu")

# Where each parameter of the model below lies, of three stages.
THREE: dict[str, tuple[int, ...]] = {
    "wte": (0, 2),
    "up": (0,),
    "bias": (0,),
    "alpha": (0, 2),
    "mid": (1,),
    "gain": (1,),
    "down": (2,),
}
TWO = {name: tuple(dict.fromkeys(min(p, 1) for p in at)) for name, at in THREE.items()}
APART = {name: at[:1] for name, at in TWO.items()}  # nothing is tied


class Parameters(nn.Module):
    """Rows that two ranks don't divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Parameter(torch.randn(7, 4))
        self.up = nn.Parameter(torch.randn(5, 4))
        self.bias = nn.Parameter(torch.randn(5))
        self.alpha = nn.Parameter(torch.randn(3))
        self.mid = nn.Parameter(torch.randn(3, 5))
        self.gain = nn.Parameter(torch.randn(()))
        self.down = nn.Parameter(torch.randn(4, 6))


def gradients(steps: int, holders: Mapping[str, Collection[int]]) -> Iterator[dict[tuple[str, int], torch.Tensor]]:
    """A gradient of each parameter by each of its stages."""
    generator = torch.Generator().manual_seed(1)
    shapes = {n: p.shape for n, p in Parameters().named_parameters()}
    for step in range(steps):
        size = 10.0 ** (step % 3 - 1)
        yield {(n, p): torch.randn(shapes[n], generator=generator) * size for n, at in holders.items() for p in at}


def plan_of(record: Any = None, **more: Any) -> zgraph.Plan:
    record = zgraph.AdamW(lr=1e-2) if record is None else record
    return zgraph.Plan(**{"backend": "eager", "zero": 3, "param_persistence_threshold": 0} | more, optimizer=record)


HALF = {"parameter": "float32", "compute": "float16", "reduce": "float32"}


def scaled_plan() -> zgraph.Plan:
    scale = LossScale(initial_scale_power=4, hysteresis=1)
    return plan_of(grad_clip=1.0, precision=zgraph.Precision(**HALF, loss_scale=scale))


class Stage:
    """The update of one rank: its program, and what it holds."""

    def __init__(self, plan: zgraph.Plan, held: OwnedParameters, sizes: dict[str, int], rank: int) -> None:
        model = Parameters()
        self.held = held
        self.sizes = sizes
        self.rank = rank  # within the stage
        self.specs = layout(model, sizes, plan.zero, 0, plan.resolved_precision())
        self.members = [m for m in members_of(model, self.specs, plan.optimizer) if m.name in held.own]
        self.options = update_options(plan, self.members, self.specs, held=held)
        history = whole_update(model, self.specs, plan, sizes, CPU_DEVICE, held=held)
        assert history is not None
        self.program = history.program
        self.loss = 0.0
        self.kept: dict[tuple[Any, str], torch.Tensor] = {
            (InputRole.STATE, "/step"): torch.zeros((), dtype=torch.float64)
        }
        for member in self.members:
            param = self.cut(member.name, dict(model.named_parameters())[member.name].detach())
            self.kept[InputRole.PARAMETER, member.name] = param
            for key, state in states_of(member, self.specs[member.name], self.options).items():
                made = torch.full(state.shape, state.fill, dtype=state.dtype)
                self.kept[InputRole.STATE, f"{member.name}/{key}"] = made
        for key, first in (scaler.initial(self.options.loss_scale) if self.options.loss_scale else {}).items():
            self.kept[InputRole.STATE, f"/{key}"] = first
        self.kept[InputRole.STATE, "/nonfinite"] = torch.tensor(0)
        self.kept[InputRole.RANK_INDEX, "dp"] = torch.tensor(rank)

    def cut(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        spec = self.specs[name]
        if spec.shard_dim is None:
            return whole.clone()
        padded = torch.zeros(spec.rows * self.sizes["dp"], *whole.shape[1:])
        padded[: len(whole)] = whole
        return padded[spec.rows * self.rank : spec.rows * (self.rank + 1)].clone()

    def inputs(self, grads: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        given = self.kept | {(InputRole.GRADIENT, n): self.cut(n, g) for n, g in grads.items()}
        given[InputRole.SCALARS, "scalars"] = torch.tensor(self._numbers(), dtype=torch.float64)
        return [given[p.role, p.name] for p in self.program.inputs]

    def _numbers(self) -> list[float]:
        records = {m.group: m.record for m in self.members}
        found = []
        for group, path in scalar_names(self.members, self.options):
            key, _, at = path.partition(".")
            value: Any = {"loss": self.loss, "factor": 1.0}[path] if group < 0 else getattr(records[group], key)
            found.append(float(value[int(at)] if at else value))
        return found

    def state(self, name: str) -> torch.Tensor:
        return self.kept[InputRole.STATE, name]


def my_groups(mesh: dict[str, int], names: Collection[str]) -> dict[str, str]:
    """The process groups of this rank, by the names that programs have for them."""
    found = {}
    for name in names:
        for ranks in dict.fromkeys(tuple(group_ranks(mesh, name, r)) for r in range(dist.get_world_size())):
            made = dist.new_group(list(ranks))
            if dist.get_rank() in ranks:
                found[name] = made.group_name
    return found


def on_stages(
    plan: zgraph.Plan,
    holders: Mapping[str, Collection[int]],
    steps: int,
    dp: int = 1,
    bad: tuple[int, str, float] | None = None,
    loss: float = 0.0,
) -> dict[str, Any]:
    """Some steps on real ranks: the norm of each, and then this rank's weights, counts and scale. `bad` is a number in a gradient of the
    second step: (stage, parameter, number); `loss` the last stage's in that step."""
    stages = dist.get_world_size() // dp
    mesh = {"pp": stages, "dp": dp}
    at = coordinates(mesh, dist.get_rank())
    held = held_at(at["pp"], holders, stages)
    stage = Stage(plan, held, {"dp": dp}, at["dp"])
    parts = {part_of("pp", set(p), mesh) for p in holders.values() if len(set(p)) > 1}
    groups = my_groups(mesh, sorted({"pp", "dp"} | parts))
    compile_one = compile_chunk if plan.backend == "inductor" else compile_eager
    executable = compile_chunks(stage.program, lambda part: compile_one(part, groups))
    norms = []
    for step, grads in enumerate(gradients(steps, holders)):
        mine = {n: g for (n, p), g in grads.items() if p == at["pp"]}
        stage.loss = 0.0
        if bad is not None and step == 1 and bad[0] == at["pp"]:
            mine[bad[1]].view(-1)[-1] = bad[2]
        if step == 1 and at["pp"] == stages - 1:
            stage.loss = loss
        results, _ = executable.run(stage.inputs(mine))
        norms += [v for p, v in zip(stage.program.outputs, results, strict=True) if p.name == "grad_norm"]
    numbers = {n: v for (role, n), v in stage.kept.items() if role is InputRole.STATE and n.startswith("/")}
    weights = {n: v for (role, n), v in stage.kept.items() if role is InputRole.PARAMETER}
    run = [n.name for c in executable.chunks for n in launches(c.executable.source, c.executable.program)]
    order = starts(stage.program), [n for n in run if n in starts(stage.program)]
    return {"norms": norms, "weights": weights, "numbers": numbers, "order": order, "at": at}


def in_one_process(
    holders: Mapping[str, Collection[int]],
    steps: int,
    clip: float | None = None,
    norm_type: float = 2.0,
    skip: int = -1,
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """torch's clip_grad_norm_ and AdamW on all parameters: the norms and the weights. No step is made of the one to `skip`."""
    model = Parameters()
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    norms = []
    for step, grads in enumerate(gradients(steps, holders)):
        for name, param in model.named_parameters():
            param.grad = sum(grads[name, p] for p in sorted(set(holders[name])))
        if step == skip:
            continue
        if clip is not None:
            norms.append(clip_grad_norm_(model.parameters(), clip, norm_type, foreach=False))
        theirs.step()
    return norms, {n: p.detach() for n, p in model.named_parameters()}


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


def whole(found: list[dict[str, Any]], name: str, stage: int) -> torch.Tensor:
    rows = [f["weights"][name] for f in found if f["at"]["pp"] == stage]
    shape = dict(Parameters().named_parameters())[name].shape
    return torch.cat(rows)[: shape[0]] if len(rows) > 1 and shape else rows[0]


def weights_are(
    found: list[dict[str, Any]],
    holders: Mapping[str, Collection[int]],
    expected: dict[str, torch.Tensor],
    rounding: float,
) -> None:
    for name, stages in holders.items():
        copies = [whole(found, name, p) for p in set(stages)]
        assert all(torch.equal(copies[0], c) for c in copies), f"{name} differs between its stages"
        if rounding:
            assert (copies[0] - expected[name]).norm() <= rounding * expected[name].norm(), name
        else:
            assert torch.equal(copies[0], expected[name]), name


# -- real ranks ----------------------------------------------------------------------------------------------------------
@pytest.mark.gloo
@pytest.mark.parametrize("holders", [APART, TWO], ids=["nothing is tied", "tied"])
@pytest.mark.slow
def test_without_clipping_the_stages_weights_are_torchs_bit_for_bit(two, holders):
    found = two.run(on_stages, plan_of(), holders, 3)
    weights_are(found, holders, in_one_process(holders, 3)[1], 0.0)


@pytest.mark.gloo
@sweep("norm_type", [1.0, 2.0, 3.0, math.inf], quick=(2, 3))
def test_gradients_are_clipped_by_the_norm_of_all_stages(three, norm_type):
    plan = plan_of(grad_clip=zgraph.GradClip(norm=0.5, norm_type=norm_type))
    found = three.run(on_stages, plan, THREE, 3)
    norms, weights = in_one_process(THREE, 3, 0.5, norm_type)
    for rank in found:
        assert all(torch.equal(mine, first) for mine, first in zip(rank["norms"], found[0]["norms"], strict=True))
        assert all(abs(mine - norm) <= ROUNDING * norm for mine, norm in zip(rank["norms"], norms, strict=True))
    weights_are(found, THREE, weights, ROUNDING)


@pytest.mark.gloo
def test_tied_gradients_are_summed_over_their_stages_also_where_they_are_sharded():
    with Ranks(6) as ranks:
        found = ranks.run(on_stages, plan_of(grad_clip=0.5), THREE, 2, 2)
        plain = ranks.run(on_stages, plan_of(), THREE, 2, 2)
    norms, weights = in_one_process(THREE, 2, 0.5)
    for rank in found:
        assert all(abs(mine - norm) <= ROUNDING * norm for mine, norm in zip(rank["norms"], norms, strict=True))
    weights_are(found, THREE, weights, ROUNDING)
    weights_are(plain, THREE, in_one_process(THREE, 2)[1], 0.0)


@pytest.mark.gloo
@sweep(
    "stage, name, number",
    [(*place, number) for number in (math.inf, math.nan) for place in ((0, "up"), (1, "gain"), (2, "wte"))],
    quick=(4,),
)
def test_an_overflow_on_one_stage_skips_the_update_on_all(three, stage, name, number):
    found = three.run(on_stages, scaled_plan(), THREE, 3, 1, (stage, name, number))
    for rank in found:
        assert float(rank["numbers"]["/scale"]) == 8.0 and int(rank["numbers"]["/skipped"]) == 1
        assert float(rank["numbers"]["/step"]) == 2
        assert not rank["norms"][1].isfinite() and rank["norms"][2].isfinite()
    weights_are(found, THREE, in_one_process(THREE, 3, 1.0, skip=1)[1], ROUNDING)


@pytest.mark.gloo
@pytest.mark.parametrize("bad,loss", [((0, "up", math.nan), 0.0), (None, math.inf)], ids=["a gradient", "the loss"])
def test_a_step_that_is_not_finite_on_one_stage_is_counted_and_skipped_on_all(three, bad, loss):
    found = three.run(on_stages, plan_of(on_nonfinite="skip"), THREE, 3, 1, bad, loss)
    assert [int(rank["numbers"]["/nonfinite"]) for rank in found] == [1, 1, 1]
    weights_are(found, THREE, in_one_process(THREE, 3, skip=1)[1], 0.0)


@pytest.mark.gloo
def test_a_norm_that_is_not_finite_on_one_stage_changes_no_stage_where_that_is_an_error(two):
    plan = plan_of(grad_clip=zgraph.GradClip(norm=1e9, error_if_nonfinite=True))
    found = two.run(on_stages, plan, TWO, 3, 1, (1, "gain", math.inf))
    assert not any(rank["norms"][1].isfinite() for rank in found)
    weights_are(found, TWO, in_one_process(TWO, 3, skip=1)[1], 0.0)


@pytest.mark.gloo
def test_a_stage_that_trains_nothing_takes_part_in_the_norm_and_the_skip(two):
    holders = {name: (0,) for name in THREE}
    plan = plan_of(grad_clip=0.5, on_nonfinite="skip")
    found = two.run(on_stages, plan, holders, 3, 1, (0, "mid", math.nan))
    assert not found[1]["weights"] and int(found[1]["numbers"]["/nonfinite"]) == 1
    assert torch.equal(found[0]["norms"][2], found[1]["norms"][2])
    weights_are(found, holders, in_one_process(holders, 3, 0.5, skip=1)[1], ROUNDING)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.inductor
def test_inductors_code_keeps_the_order_in_which_stages_meet(three):
    found = three.run(on_stages, plan_of(backend="inductor", grad_clip=0.5, on_nonfinite="skip"), THREE, 2)
    for rank in found:
        expected, run = rank["order"]
        assert run == expected and len(run) == len(held_at(rank["at"]["pp"], THREE, 3).tied) + 2
    weights_are(found, THREE, in_one_process(THREE, 2, 0.5)[1], ROUNDING)


# -- programs ------------------------------------------------------------------------------------------------------------
def specs_of(plan: zgraph.Plan, sizes: dict[str, int]) -> dict[str, ParamSpec]:
    return layout(Parameters(), sizes, plan.zero, 0, plan.resolved_precision())


def updates(plan: zgraph.Plan, holders: Mapping[str, Collection[int]], stages: int = 3, dp: int = 2) -> list[History]:
    """The update of every stage."""
    specs = specs_of(plan, {"dp": dp})
    made = [
        whole_update(Parameters(), specs, plan, {"dp": dp}, CPU_DEVICE, held=held_at(p, holders, stages))
        for p in range(stages)
    ]
    return [m for m in made if m is not None]


def starts(program: Program) -> list[str]:
    """The collectives that stages share, in order."""
    found = [n for n in program.graph.nodes if collectives.is_start(n)]
    return [n.name for n in found if collectives.group_of(n).startswith("pp")]


EVERYTHING = {
    "grad_clip": zgraph.GradClip(norm=1.0, norm_type=math.inf),
    "loss_average": "token",
    "on_nonfinite": "skip",
}
LAST_HAS_ONLY_TIED = THREE | {"down": (1,)}
LAST_HAS_NOTHING = {name: tuple(min(p, 1) for p in at) for name, at in THREE.items()}
PLANS = {
    "AdamW": plan_of(**EVERYTHING),
    "8 bit": plan_of(zgraph.AdamW8bit(lr=1e-2), **EVERYTHING),
    "LAMB": plan_of(zgraph.LAMB(lr=1e-2), **EVERYTHING),
    "Muon": plan_of(zgraph.Muon(lr=1e-2, companion=zgraph.AdamW(lr=1e-3)), **EVERYTHING),
    "loss scale": scaled_plan(),
    "offloaded": plan_of(**EVERYTHING, offload={"optimizer": "cpu", "least_bytes": 0}),
    "offloaded with weights": plan_of(
        **EVERYTHING, offload={"optimizer": "cpu", "parameters": "cpu", "update_on": "device", "least_bytes": 0}
    ),
}


@pytest.mark.core
@sweep("holders", [THREE, LAST_HAS_ONLY_TIED, LAST_HAS_NOTHING], quick=1, ids=["three", "only tied", "nothing"])
@sweep("kind", list(PLANS), quick=4)
def test_stages_meet_in_one_order_after_every_pass(kind, holders):
    """The sums by their parameters' names, whatever the parameters' order; the norm; the skip."""
    histories = updates(PLANS[kind], holders)
    for records in zip(*(h.records for h in histories), strict=True):
        check_collective_order([shared_collectives(record.program) for record in records])
    for position, history in enumerate(histories):
        tied = sorted(held_at(position, holders, 3).tied)
        names = starts(history.program)
        assert names[: len(tied)] == [f"tied_{n}" for n in tied]
        norm, skip = shared_collectives(history.program)["pp"]
        assert norm.endswith("of all parameters, torch.float64[]")
        assert skip.startswith("all_reduce max of all parameters, torch.float32")
        verify_program(history.program)


@pytest.mark.core
def test_parameters_that_are_updated_early_do_not_change_the_order_of_sums():
    plan = plan_of(grad_clip=1.0)
    specs = specs_of(plan, {"dp": 1})
    orders = []
    for first in ((), ("wte",), ("alpha",), ("up", "wte", "alpha")):
        held = held_at(0, THREE, 3)
        members = [m for m in members_of(Parameters(), specs, plan.optimizer) if m.name in held.own]
        options = update_options(plan, members, specs, held=held)
        mesh = mesh_of({"dp": 1}, held)
        program = update_history(plan, members, specs_here(specs, held), mesh, CPU_DEVICE, options, first=first).program
        orders.append(starts(program)[:2])
    assert orders == [["tied_alpha", "tied_wte"]] * 4


@pytest.mark.core
def test_a_collective_that_could_run_earlier_stays_behind_those_before_it():
    """Of a number that is there from the start: on another stage, where it is not, it would come last."""
    plan = plan_of(grad_clip=1.0)
    program = updates(plan, THREE)[0].records[0].program.snapshot()
    count = program.input_nodes(InputRole.STATE)["/step"]
    record = NodeInfo(Phase.UPDATE, Role.REDUCE, mesh_dim="pp")
    with program.graph.inserting_before(program.output_node()):
        start = program.call(collectives.ALL_REDUCE, (count, "max", "pp"), record, name="most")
        wait = program.call(collectives.WAIT, (start,), record.replace(role=Role.WAIT), name="counted")
    program.set_outputs([*program.output_items(), (Port(OutputRole.OUTPUT, "most"), wait)])
    before = starts(program)
    assert before[-1] == "most" and len(before) == 4
    assert starts(PassManager(build_update_passes(plan)).run(program).program) == before


@pytest.mark.core
@sweep("kind", ["LAMB", "Muon", "8 bit"], quick=(1, 2))
def test_rules_that_need_whole_parameters_stay_within_the_stage(kind):
    """A stage's update, without what all decide together, is what one update of all parameters makes of its own."""
    plan = PLANS[kind].model_copy(update={"grad_clip": None, "on_nonfinite": "ignore", "loss_average": "batch"})
    (grads,) = gradients(1, APART)

    def made(held: OwnedParameters, mesh: dict[str, int]) -> dict[str, list[torch.Tensor]]:
        ranks = [Stage(plan, held, {"dp": 2}, coordinates(mesh, r)["dp"]) for r in range(math.prod(mesh.values()))]
        given = [r.inputs({n: g for (n, _), g in grads.items() if n in held.own}) for r in ranks]
        run_virtual(ranks[0].program, given)
        return {n: [r.kept[InputRole.PARAMETER, n] for r in ranks] for n in held.own}

    together = made(OwnedParameters(frozenset(APART), 1), {"pp": 1, "dp": 2})
    for position in (0, 1):
        apart = made(held_at(position, APART, 2), {"pp": 2, "dp": 2})
        assert apart and all(torch.equal(v, w) for n in apart for v, w in zip(apart[n], together[n] * 2, strict=True))


@pytest.mark.core
def test_on_virtual_ranks_gradients_of_all_stages_are_summed_as_they_lie():
    """All stages hold the same here: the program is one, over the whole dimension."""
    holders = {name: (0, 1) for name in THREE}
    plan = plan_of(zgraph.SGD(lr=1.0))
    mesh = {"pp": 2, "dp": 2}
    (grads,) = gradients(1, holders)
    ranks = []
    for rank in range(4):
        at = coordinates(mesh, rank)
        ranks.append(Stage(plan, replace(held_at(0, holders, 2)), {"dp": 2}, at["dp"]))
    assert set(held_at(0, holders, 2).tied.values()) == {"pp"}
    given = [
        r.inputs({n: g for (n, p), g in grads.items() if p == coordinates(mesh, rank)["pp"]})
        for rank, r in enumerate(ranks)
    ]
    before = copy.deepcopy([r.kept for r in ranks])
    run_virtual(ranks[0].program, given)
    for rank, (mine, old) in enumerate(zip(ranks, before, strict=True)):
        for name in holders:
            summed = mine.cut(name, grads[name, 0] + grads[name, 1])
            assert torch.equal(mine.kept[InputRole.PARAMETER, name], old[InputRole.PARAMETER, name] - summed), (
                rank,
                name,
            )


@pytest.mark.core
def test_a_tied_gradient_is_summed_in_the_dtype_it_is_kept_in():
    plan = plan_of()
    low = {n: replace(s, dtype=torch.bfloat16) for n, s in specs_of(plan, {"dp": 1}).items()}
    for kept in (torch.bfloat16, torch.float32):
        specs = {n: replace(s, accumulate=kept) for n, s in low.items()}
        held = held_at(0, THREE, 3)
        program = whole_update(Parameters(), specs, plan, {"dp": 1}, CPU_DEVICE, held=held)
        assert program is not None
        node = next(n for n in program.program.graph.nodes if n.name == "tied_wte")
        assert node.meta["val"].dtype is kept


@pytest.mark.core
def test_a_tied_gradient_whose_rows_lie_otherwise_is_sent_as_it_lies():
    plan = plan_of()
    specs = specs_of(plan, {"dp": 1})
    specs["wte"] = replace(specs["wte"], shape=(6, 3, 2, 2), stride=(12, 1, 6, 3))
    held = held_at(0, THREE, 3)
    member = Member("wte", plan.optimizer, 0)
    options = update_options(plan, [member], specs, held=held)
    mesh = mesh_of({"dp": 1}, held)
    program = update_history(plan, [member], specs_here(specs, held), mesh, CPU_DEVICE, options).program
    node = next(n for n in program.graph.nodes if n.name == "tied_wte")
    assert node.meta["val"].is_contiguous()
    unpacked = next(n for n in program.graph.nodes if n.name == "unpacked_wte")
    assert unpacked.meta["val"].shape == (6, 3, 2, 2) and unpacked.meta["val"].stride() == (12, 1, 6, 3)


@pytest.mark.core
def test_gradients_that_are_only_clipped_are_summed_and_written_too():
    plan = plan_of()
    specs = specs_of(plan, {"dp": 1})
    held = held_at(0, THREE, 3)
    options = UpdateOptions(tied=held.tied, uncounted=held.uncounted)
    members = [Member(n, None, -1) for n in sorted(held.own)]
    mesh = mesh_of({"dp": 1}, held)
    program = update_history(plan, members, specs_here(specs, held), mesh, CPU_DEVICE, options).program
    written = [n.all_input_nodes[0].name for n in program.graph.nodes if n.target is torch.ops.aten.copy_.default]
    assert sorted(written) == ["grad_alpha", "grad_wte"]


@pytest.mark.core
def test_without_a_pipeline_an_update_has_no_more_collectives_than_before():
    plan = plan_of(**EVERYTHING)
    specs = specs_of(plan, {"dp": 2})
    plain = whole_update(Parameters(), specs, plan, {"dp": 2}, CPU_DEVICE)
    one = whole_update(Parameters(), specs, plan, {"dp": 2}, CPU_DEVICE, held=OwnedParameters(frozenset(THREE), 1))
    assert plain is not None and one is not None
    assert [str(n) for n in plain.program.graph.nodes] == [str(n) for n in one.program.graph.nodes]
    assert not shared_collectives(plain.program) and list(one.program.mesh) == ["pp", "dp"]


@pytest.mark.core
def test_a_program_with_a_part_of_a_dimension_comes_back_from_json():
    program = updates(plan_of(grad_clip=1.0), THREE)[0].program
    again = from_json(to_json(program))
    verify_program(again)
    assert starts(again) == starts(program) and shared_collectives(again) == shared_collectives(program)
    assert "reduce @pp[0,2]" in render(again) and "mesh pp 3 x dp 2" in render(again)


# -- groups --------------------------------------------------------------------------------------------------------------
@pytest.mark.core
def test_a_part_of_a_dimension_has_one_name():
    mesh = {"pp": 4, "dp": 2}
    assert part_of("pp", [3, 0, 3], mesh) == "pp[0,3]"
    assert part_of("pp", range(4), mesh) == "pp"
    assert positions_of("pp[0,3]", mesh) == (0, 3) and positions_of("dp", mesh) == (0, 1)
    assert group_ranks(mesh, "pp[0,3]", 7) == [1, 7] and group_ranks(mesh, "pp", 3) == [1, 3, 5, 7]


@pytest.mark.core
@pytest.mark.parametrize("positions", [[], [1], [0, 4], [-1, 0]])
def test_positions_that_a_dimension_has_not_are_no_part_of_it(positions):
    with pytest.raises(MeshError, match="are no group"):
        part_of("pp", positions, {"pp": 4})


WRONG = ["pp[0,3]", "pp[2,0]", "pp[0,0]", "pp[1]", "pp[0,1,2]", "tp[0,1]", "tp", "pp[]", "pp[0,2"]


@pytest.mark.core
@pytest.mark.parametrize("group", WRONG)
def test_a_sum_over_a_group_that_the_mesh_has_not_is_refused(group):
    program = updates(plan_of(), THREE)[0].program.snapshot()
    start = next(n for n in program.graph.nodes if n.name == "tied_wte")
    collectives.set_group(start, group)
    set_info(start, info(start).replace(mesh_dim=group))
    with pytest.raises(VerifyError, match="wrong group") as caught:
        verify_program(program)
    assert caught.value.node == "tied_wte"
    with pytest.raises(MeshError):
        positions_of(group, program.mesh)


@pytest.mark.core
def test_a_virtual_rank_that_is_not_in_the_group_of_a_collective_is_an_error():
    stages = [Stage(plan_of(), held_at(0, THREE, 3), {"dp": 1}, 0) for _ in range(3)]
    (grads,) = gradients(1, THREE)
    given = [s.inputs({n: g for (n, p), g in grads.items() if p == 0}) for s in stages]
    with pytest.raises(MeshError, match="rank 1 is not in the group 'pp\\[0,2\\]'"):
        run_virtual(stages[0].program, given)


@pytest.mark.core
def test_a_sum_over_a_part_costs_what_its_own_ranks_send():
    link = Link(bandwidth=1e6, latency=1e-3)
    costs = Costs(CPU.model_copy(update={"links": {"pp": link, "*": Link(bandwidth=1e12)}}))
    assert isinstance(costs.hardware, Hardware) and costs.hardware.link("pp[0,2]") is link
    program = updates(plan_of(), THREE, dp=1)[0].program
    spans = {s.node: s for s in simulate(program, costs).spans if s.lane == "link:pp"}
    size = Parameters().wte.nbytes
    assert spans["tied_wte"].seconds == pytest.approx(2 * 1e-3 + size / 1e6)  # two ranks: twice half of the bytes


@pytest.mark.core
def test_stages_that_disagree_about_a_tied_gradient_are_told_before_they_wait_for_each_other():
    views = [shared_collectives(h.program) for h in updates(plan_of(grad_clip=1.0), THREE)]
    check_collective_order(views)
    assert views[0]["pp[0,2]"] == [
        "all_reduce sum of alpha, torch.float32[2]",
        "all_reduce sum of wte, torch.float32[4, 4]",
    ]
    frozen = copy.deepcopy(views)
    del frozen[2]["pp[0,2]"][1]
    with pytest.raises(RankMismatchError, match="disagree about the update") as caught:
        check_collective_order(frozen)
    assert "positions 0 and 2" in str(caught.value) and "'pp[0,2]'" in str(caught.value)
    assert "all_reduce sum of wte" in str(caught.value)
    del views[1]["pp"][0]
    with pytest.raises(RankMismatchError, match="positions 0 and 1"):
        check_collective_order(views)


@pytest.mark.core
@pytest.mark.parametrize("at", [(), (3,), (-1, 0)])
def test_a_parameter_that_lies_on_no_rank_of_the_pipeline_is_refused(at):
    with pytest.raises(MeshError, match="'down' lies at"):
        held_at(0, THREE | {"down": at}, 3)


# -- what each stage knows of the whole optimizer ------------------------------------------------------------------------
@pytest.mark.core
def test_a_group_of_parameters_may_lie_on_another_stage_but_not_nowhere():
    groups = (zgraph.ParamGroup(match="mid", lr=0.5), zgraph.ParamGroup(match="down", weight_decay=0.1))
    model = Parameters()
    plan = plan_of(zgraph.AdamW(lr=1e-2, groups=groups))
    specs = specs_of(plan, {"dp": 1})
    everywhere = members_of(model, specs, plan.optimizer)
    shown = []
    for position in range(3):
        held = held_at(position, THREE, 3)
        params = {n: p if n in held.own else nn.Parameter(p.detach().to("meta")) for n, p in model.named_parameters()}
        optimizer = PlanOptimizer(everywhere, params, None, held.own)
        shown.append([(g["names"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups])
        mine = {id(p) for g in optimizer.param_groups for p in g["params"]}
        assert mine == {id(params[n]) for n in held.own}
        members = [m for m in everywhere if m.name in held.own]
        wanted = [w for w in scalar_names(members, update_options(plan, members, specs)) if w[1] == "lr"]
        found = dict(zip([group for group, _ in wanted], optimizer.numbers(wanted), strict=True))
        assert found == {m.group: m.record.lr for m in members}
    assert shown[0] == shown[1] == shown[2] and len(shown[0]) == 3
    nowhere = plan_of(zgraph.AdamW(lr=1e-2, groups=(*groups, zgraph.ParamGroup(match="head*", lr=0.1))))
    with pytest.raises(PlanError, match="matches no parameter"):
        members_of(model, specs, nowhere.optimizer)


@pytest.mark.core
def test_a_stage_keeps_states_of_its_own_parameters_alone():
    plan = plan_of()
    specs = specs_of(plan, {"dp": 1})
    model = Parameters().to("meta")
    sizes = [state_bytes(model, specs, plan, held_at(p, APART, 2)) for p in range(2)]
    assert all(sizes) and sum(sizes) == state_bytes(model, specs, plan)
    program = updates(plan, APART, 2)[1].program
    ports = {p.name.partition("/")[0] for p in program.inputs if p.role is not InputRole.RANK_INDEX} - {"", "scalars"}
    assert ports == {n for n, at in APART.items() if at == (1,)} == set(program.params)
    assert all(p.role is not OutputRole.OUTPUT for p in program.outputs)

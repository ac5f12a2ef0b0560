"""Local steps (DiLoCo), step for step what a reference written from the paper does; programs, bytes, restarts, refusals."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from one_bit import Net, batch, transfers, weights
from ranks import Ranks
from sweeps import sweep
from torch import nn

import zgraph
from zgraph.errors import ModelError, PlanError, StepError, UnsupportedError, VerifyError
from zgraph.inspection.make_inspection import of_model
from zgraph.passes import verify_program
from zgraph.plan.optimizers import UpdateKind
from zgraph.program.block_quantization import bytes_of
from zgraph.program.program import Fact
from zgraph.verification.virtual_step import virtual_step

EVERY, STEPS = 4, 24
ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.99)}
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
MIDDLE = 10  # two steps into a round of four
FORMAT = {"int8": 127, "int4": 7}


def local(**fields) -> zgraph.LocalSteps:
    return zgraph.LocalSteps(**{"every": EVERY, "outer": zgraph.SGD(**OUTER), **fields})


def plan(steps: dict | None = None, **fields) -> zgraph.Plan:
    given = {"mesh": {"replicate": -1}, "backend": "eager", "optimizer": zgraph.AdamW(**ADAMW), **fields}
    return zgraph.Plan(local_steps=local(**(steps or {})), **given)


class Even(Net):
    """The same with widths that two ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 12)
        self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 4)


def net_for(fields: dict) -> type[Net]:
    return Even if "tp" in fields.get("mesh", {}) else Net


# -- the reference ----------------------------------------------------------------------------------------------------
def rounded(x: torch.Tensor, format: str, block: int = 256) -> torch.Tensor:
    """What is read of a part of a tensor that was sent in blocks with a scale for each."""
    if format == "same":
        return x
    most, parts = FORMAT[format], []
    for block_ in x.split(block):
        scale = block_.abs().max() / most
        parts.append((block_ / scale).round() * scale if scale > 0 else block_)
    return torch.cat(parts)


class Reference:
    """DiLoCo (Douillard et al., 2023, Algorithm 1), on all groups at once; torch's own optimizers inside and outside."""

    def __init__(
        self, groups: int, dtype=torch.float32, format: str = "same", outer=OUTER, net: type[Net] = Net
    ) -> None:
        self.groups, self.format, self.steps = groups, format, 0
        self.nets = [net().to(dtype) for _ in range(groups)]
        self.inner = [torch.optim.AdamW(net.parameters(), **ADAMW) for net in self.nets]
        self.common = net().to(dtype)
        self.outer = torch.optim.SGD(self.common.parameters(), **outer)

    def mean(self, moved: list[torch.Tensor]) -> torch.Tensor:
        """The groups' mean: rounded where it is sent, added up, and rounded again."""
        count = moved[0].numel()
        if (
            self.format == "same"
            or self.groups * bytes_of(math.ceil(count / self.groups), self.format, 256)
            >= count * moved[0].element_size()
        ):
            return torch.stack(moved).mean(0)
        size = math.ceil(count / self.groups)
        flat = [torch.cat([m.flatten(), m.new_zeros(size * self.groups - count)]).view(self.groups, -1) for m in moved]
        parts = []
        for part in range(self.groups):
            mean = torch.stack([rounded(f[part], self.format) for f in flat]).sum(0) / self.groups
            parts.append(rounded(mean, self.format))
        return torch.cat(parts)[:count].view(moved[0].shape)

    def exact_step(self, batches) -> list[dict[str, torch.Tensor]]:
        """The weights of all groups after a step by their mean gradient, from which rounds begin."""
        self.steps += 1
        for net in self.nets:
            net.zero_grad()
            for part in batches:
                (net(part) / len(batches)).backward()
        for inner in self.inner:
            inner.step()
        self.common.load_state_dict(self.nets[0].state_dict())
        return [weights(net) for net in self.nets]

    def step(self, batches) -> list[dict[str, torch.Tensor]]:
        """The weights of all groups after a step; `batches` has, for each group, those of its ranks and micro-batches."""
        self.steps += 1
        for net, inner, parts in zip(self.nets, self.inner, batches, strict=True):
            net.zero_grad()
            for part in parts:
                (net(part) / len(parts)).backward()
            inner.step()
        if self.steps % EVERY == 0:
            for p, *own in zip(self.common.parameters(), *(n.parameters() for n in self.nets), strict=True):
                p.grad = self.mean([p.detach() - o.detach() for o in own])
            self.outer.step()
            for net in self.nets:
                net.load_state_dict(self.common.state_dict())
        return [weights(net) for net in self.nets]


# -- ranks ------------------------------------------------------------------------------------------------------------
def path(steps: int, micro_batches: int, local_fields: dict, fields: dict, dtype) -> list[dict[str, torch.Tensor]]:
    """The weights of this rank after each step."""
    model = zgraph.compile(net_for(fields)().to(dtype), plan(local_fields, micro_batches=micro_batches, **fields))
    found, mine = [], dist.get_rank() // model.zgraph.plan.mesh.get("tp", 1)
    for step in range(steps):
        parts = [batch(2 * step + n, mine) for n in range(micro_batches)]
        model.zgraph.train_step(torch.cat(parts))
        found.append(weights(model))
    return found


def follows(
    ranks: Ranks,
    world: int,
    *,
    groups: int = 2,
    steps: int = STEPS,
    micro_batches: int = 1,
    dtype: torch.dtype = torch.float32,
    local_fields: dict | None = None,
    **fields,
) -> float:
    """How far weights were from the reference's at most. After each round all ranks have the same, bit for bit."""
    told, worst = local_fields or {}, 0.0
    outer = told["outer"].model_dump(include={"lr", "momentum", "nesterov", "dampening"}) if "outer" in told else OUTER
    reference = Reference(groups, dtype, told.get("wire", "same"), outer, net_for(fields))
    found = ranks.run(path, steps, micro_batches, told, fields, dtype)
    within, alike = world // groups, fields.get("mesh", {}).get("tp", 1)  # (ranks in a group; those with the same rows)
    for step in range(steps):
        batches = [
            [
                batch(2 * step + n, (group * within + at) // alike)
                for at in range(0, within, alike)
                for n in range(micro_batches)
            ]
            for group in range(groups)
        ]
        mine = [of_rank[step] for of_rank in found]
        expected = reference.step(batches)
        for rank, own in enumerate(mine):
            worst = max(worst, *(float((own[n] - v).abs().max()) for n, v in expected[rank // within].items()))
        together = all(torch.equal(mine[0][n], mine[-1][n]) for n in mine[0])
        assert together == ((step + 1) % EVERY == 0), step
    return worst


@pytest.mark.gloo
def test_two_groups_do_what_the_algorithm_says(two: Ranks) -> None:
    assert follows(two, 2) <= 1e-6


def begun_later(exact_steps: int, zero: int) -> list[dict[str, torch.Tensor]]:
    """The weights of this rank after each step, of which the first ones are exact."""
    rounds = plan(mesh={"replicate": 2}, zero=zero)
    model = zgraph.compile(Net(), rounds.model_copy(update={"local_steps": None}))
    found = []
    for step in range(STEPS):
        if step == exact_steps:
            model.zgraph.recompile(rounds)
        model.zgraph.train_step(batch(step, dist.get_rank()))
        found.append(weights(model))
    return found


@pytest.mark.gloo
def test_rounds_begin_after_exact_steps_where_a_run_takes_their_plan(two: Ranks) -> None:
    exact_steps, worst, reference = 5, 0.0, Reference(2)
    found = two.run(begun_later, exact_steps, 3)
    for step in range(STEPS):
        batches = [batch(step, 0), batch(step, 1)]
        rounds = step >= exact_steps
        expected = reference.step([[rows] for rows in batches]) if rounds else reference.exact_step(batches)
        for rank, values in enumerate(expected):
            worst = max(worst, *(float((found[rank][step][n] - v).abs().max()) for n, v in values.items()))
    assert worst <= 1e-6


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_shards_within_groups_do_the_same(four: Ranks, zero: int) -> None:
    assert follows(four, 4, mesh={"replicate": 2, "dp": 2}, zero=zero) <= 1e-6


@pytest.mark.gloo
@pytest.mark.slow
def test_divided_weights_do_the_same(four: Ranks) -> None:
    layers = {"a": "colwise", "b": "rowwise"}
    mesh = {"replicate": 2, "tp": 2}
    assert follows(four, 4, mesh=mesh, tensor_parallel=layers, dtype=torch.float64) <= 1e-6


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("mesh, zero", [({"replicate": 2}, 0), ({"replicate": 2, "dp": 1}, 1), ({"replicate": 2}, 3)])
def test_micro_batches_do_the_same(two: Ranks, mesh, zero: int) -> None:
    assert follows(two, 2, mesh=mesh, zero=zero, micro_batches=2) <= 1e-6


@pytest.mark.gloo
@pytest.mark.slow
def test_micro_batches_of_shards_do_the_same(four: Ranks) -> None:
    assert follows(four, 4, mesh={"replicate": 2, "dp": 2}, zero=1, micro_batches=2) <= 1e-6


@pytest.mark.gloo
@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.parametrize("wire", ["same", "int8"])
def test_inductor_does_the_same(two: Ranks, wire: str) -> None:
    assert (
        follows(two, 2, steps=2 * EVERY + 1, dtype=torch.float64, local_fields={"wire": wire}, backend="inductor")
        <= 1e-6
    )


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"outer": zgraph.SGD(lr=1.0)},
        {"outer": zgraph.SGD(lr=0.5, momentum=0.8, dampening=0.5)},
        {"wire": "int8"},
        {"wire": "int4"},
    ],
    ids=str,
)
def test_other_outer_steps_and_few_bits_do_what_the_algorithm_says(two: Ranks, fields) -> None:
    assert follows(two, 2, dtype=torch.float64, local_fields=fields) <= 1e-6


def test_one_group_steps_as_the_outer_optimizer_says() -> None:
    model, reference = zgraph.compile(Net(), plan(mesh={"replicate": 1})), Reference(1)
    for step in range(STEPS):
        model.zgraph.train_step(batch(step, 0))
        (expected,) = reference.step([[batch(step, 0)]])
    found = weights(model)
    assert all((found[n] - v).abs().max() <= 1e-6 for n, v in expected.items())


class Labelled(nn.Module):
    """A model whose batches have other numbers of targets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(9, 11), nn.Linear(11, 7)

    def forward(self, at, labels):
        return nn.functional.cross_entropy(self.head(self.table(at)), labels)


def labelled(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.cat([batch(0, rank), batch(1, rank)])
    labels = at % 7
    labels[: 2 + 2 * rank] = -100
    return at, labels


def by_token() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights after a step of two micro-batches, and those of a plain model on this group's rows."""
    given = {"micro_batches": 2, "loss_average": "token", "optimizer": zgraph.SGD(lr=0.1)}
    model, plain = zgraph.compile(Labelled(), plan(**given)), Labelled()
    at, labels = labelled(dist.get_rank())
    model.zgraph.train_step(at, labels)
    plain(at, labels).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    return weights(model), weights(plain)


@pytest.mark.gloo
@pytest.mark.slow
def test_targets_are_counted_within_a_group(two: Ranks) -> None:
    for found, expected in two.run(by_token):
        assert all((found[n] - v).abs().max() <= 1e-6 for n, v in expected.items())


# -- plans ------------------------------------------------------------------------------------------------------------
def test_the_outer_rate_is_the_papers_where_none_is_given(tmp_path: Path) -> None:
    assert local(outer=zgraph.SGD(momentum=0.9, nesterov=True)) == local() == zgraph.LocalSteps(every=EVERY)
    assert local(outer={"momentum": 0.5}).outer.lr == 0.7
    assert local(outer=zgraph.SGD(lr=1e-3)).outer.lr == 1e-3
    plan({"wire": "int8"}).save(tmp_path / "plan.toml")
    assert zgraph.Plan.load(tmp_path / "plan.toml") == plan({"wire": "int8"})


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"mesh": {"dp": -1}}, "the mesh has no replicate"),
        ({"mesh": {"replicate": 2, "pp": 2}}, "together with a pipeline"),
        ({"mesh": {"replicate": 2, "cp": 2}}, "together with context parallelism"),
        ({"optimizer": None}, "has no optimizer"),
        ({"optimizer": zgraph.OneBitAdam()}, "together with a 1-bit optimizer"),
        ({"optimizer": zgraph.ZeroOneAdam()}, "together with a 1-bit optimizer"),
        ({"precision": "fp16"}, "together with a loss scale"),
        ({"ema": 0.9}, "each group of ranks has weights of its own"),
        ({"on_nonfinite": "skip"}, "together with local_steps"),
        ({"grad_clip": {"norm": 1.0, "error_if_nonfinite": True}}, "together with local_steps"),
        ({"offload": {"optimizer": "cpu"}}, "they stay on the device"),
        ({"wire": {"reduce": "int4", "hierarchical": True}}, "gradients are not sent between groups"),
    ],
)
def test_a_wrong_plan_is_refused(fields, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan(**fields)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"every": 0}, "every"),
        ({"outer": zgraph.AdamW()}, "is SGD, not AdamW"),
        ({"outer": {"name": "Adam"}}, "is SGD, not Adam"),
        ({"outer": zgraph.SGD(maximize=True)}, "has maximize"),
        ({"outer": zgraph.SGD(groups=(zgraph.ParamGroup(match="*", lr=1.0),))}, "has groups"),
        ({"wire": "int2"}, "wire"),
    ],
)
def test_a_wrong_record_is_refused(fields, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        local(**fields)


def test_a_real_training_is_not_compared_with_one_plain_model() -> None:
    with pytest.raises(UnsupportedError, match="can't be compared with one plain model"):
        zgraph.verify(Net(), plan(mesh={"replicate": 1}), 1, (batch(0, 0),), compiled=True)


def test_each_groups_gradients_are_those_of_the_plain_model() -> None:
    inputs = (torch.cat([batch(0, rank) for rank in range(4)]),)
    found = zgraph.verify(Net(), plan(mesh={"replicate": 2, "dp": 2}, zero=3), 4, inputs)
    assert found.ok, str(found)


def test_a_gradient_that_goes_between_groups_is_a_fault() -> None:
    inputs = (torch.cat([batch(0, rank) for rank in range(4)]),)
    exact = zgraph.Plan(mesh={"replicate": 2, "dp": 2}, backend="eager")
    with virtual_step(Net(), exact, 4, inputs) as virtual:
        program = virtual.step.history().program
    program.facts.add(Fact.IN_GROUPS)
    with pytest.raises(VerifyError, match="is not averaged over the data-parallel ranks"):
        verify_program(program)


# -- programs and bytes -----------------------------------------------------------------------------------------------
def programs_of_a_run(fields: dict) -> tuple[dict[UpdateKind, list], int, str]:
    """The transfers of the step of each kind, how many update programs were made, and the report."""
    model = zgraph.compile(Net(), plan(fields))
    runtime = model.zgraph.runtime
    found = {}
    for step in range(2 * EVERY + 1):
        model.zgraph.train_step(batch(step, dist.get_rank()))
        entry = runtime.entries[next(iter(runtime.entries))].program()
        update = runtime.updater.programs.of(tuple(runtime.shards.params()), runtime.updater.options)
        sent = transfers(entry.backward(True, False).program) + transfers(update.history.program)
        assert found.setdefault(runtime.updater.options.kind, sent) == sent
    return found, len(runtime.updater.programs.histories()), str(model.zgraph.report())


@pytest.mark.gloo
@pytest.mark.parametrize("wire", ["same", pytest.param("int8", marks=pytest.mark.slow)])
def test_each_kind_of_step_has_one_program_and_sends_its_bytes(two: Ranks, wire: str) -> None:
    sizes = [p.numel() for p in Net().parameters()]
    parts = [bytes_of(math.ceil(n / 2), wire, 256) if wire != "same" else 2 * n for n in sizes]
    small = [2 * b < 4 * n for n, b in zip(sizes, parts, strict=True)]
    few = sum(b for b, s in zip(parts, small, strict=True) if s)
    exact = ("all_reduce", 4 * sum(n for n, s in zip(sizes, small, strict=True) if not s))
    expected = [exact] if wire == "same" else [("all_to_all", 2 * few), ("all_gather", few), exact]
    for found, updates, report in two.run(programs_of_a_run, {"wire": wire}):
        assert updates == 2
        assert f"{sum(small)} of {len(sizes)} parameters in few bits; each rank sends" in report
        assert found == {UpdateKind.IN_GROUPS: [], UpdateKind.ROUNDS: expected}


def test_inspections_know_the_update_at_a_rounds_end() -> None:
    inspection = of_model(Net(), plan({"wire": "int8"}, mesh={"replicate": 2}), (batch(0, 0),), 2)
    assert [name for name, way in inspection.ways.items() if way.kind == "update"] == ["round", "update"]
    sent = {name: inspection.ways[name].after("share_rounds").facts["stats"] for name in ("round", "update")}
    assert sent["round"]["in_few_bits"] > 0 and sent["update"]["parameters"] == 0
    assert [f.program for f in inspection.forecast.programs][-1] == "update"
    (only,) = inspection.only("round").ways
    assert only == "round" and inspection.only("round").way("round").last.program.mesh == {"replicate": 2}


# -- restarts ---------------------------------------------------------------------------------------------------------
def restarted(folder: Path, at: int, local_fields: dict, fields: dict) -> tuple[dict, dict, dict]:
    """The weights of a run, of one that was saved and loaded into a new model, and those that were saved."""
    first, second = (zgraph.compile(Net(), plan(local_fields, **fields)) for _ in range(2))
    for step in range(at + EVERY + 2):
        if step == at:
            first.save_checkpoint(folder)
        first.zgraph.train_step(batch(step, dist.get_rank()))
    second.load_checkpoint(folder)
    saved = weights(second)
    for step in range(at, at + EVERY + 2):
        second.zgraph.train_step(batch(step, dist.get_rank()))
    return weights(first), weights(second), saved


@pytest.mark.gloo
@sweep(
    "at, local_fields, fields",
    [
        (MIDDLE, {}, {}),
        (2 * EVERY, {}, {}),
        (MIDDLE, {"wire": "int8"}, {}),
        (MIDDLE, {}, {"precision": "bf16"}),
        (MIDDLE, {}, {"optimizer": zgraph.AdamW8bit(lr=1e-2, min_row_size=4, block_size=8)}),
    ],
    quick=(0,),
)
def test_a_restart_in_the_middle_is_bit_for_bit(
    two: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture, at: int, local_fields, fields
) -> None:
    ranks = two.run(restarted, tmp_path, at, local_fields, fields)
    for one, other, _ in ranks:
        assert all(torch.equal(one[n], other[n]) for n in one)
    (_, _, mine), (_, _, theirs) = ranks
    apart = [n for n in mine if not torch.equal(mine[n], theirs[n])]
    assert bool(apart) == (at == MIDDLE)  # (in a round each group has weights of its own)
    alone = zgraph.compile(Net(), plan(local_fields, **{**fields, "mesh": {"replicate": 1}}))
    with caplog.at_level(logging.WARNING, "zgraph"):
        alone.load_checkpoint(tmp_path)
    what = "local steps since the last synchronization are" if apart else "what the optimizer keeps is each"
    assert f"{what} of the ranks of mesh {{'replicate': 2}}, and it is {{'replicate': 1}} now" in caplog.text
    for step in range(at, at + EVERY + 2):
        alone.zgraph.train_step(batch(step, 0))
    assert all(w.isfinite().all() for w in weights(alone).values())


def restarted_with_shards(folder: Path) -> tuple[dict, dict]:
    """The same on two groups of two."""
    one, other, _ = restarted(folder, MIDDLE, {}, {"mesh": {"replicate": 2, "dp": 2}, "zero": 3})
    return one, other


@pytest.mark.gloo
@pytest.mark.slow
def test_a_restart_of_shards_is_bit_for_bit(four: Ranks, tmp_path: Path) -> None:
    for one, other in four.run(restarted_with_shards, tmp_path):
        assert all(torch.equal(one[n], other[n]) for n in one)


def saved_in_a_round(folder: Path) -> tuple[dict, dict, dict]:
    """The weights where a round began, those that a model reads from a checkpoint of its middle, and the states of the
    inner optimizer."""
    model = zgraph.compile(Net(), plan())
    for step in range(MIDDLE):
        if step == MIDDLE - MIDDLE % EVERY:
            began = weights(model)
        model.zgraph.train_step(batch(step, dist.get_rank()))
    model.save_checkpoint(folder)
    fresh = zgraph.compile(Net(), plan())
    fresh.load_checkpoint(folder, optimizer=False)
    return began, weights(fresh), states(model)


def states(model) -> dict[str, torch.Tensor]:
    """The states of the inner optimizer on this rank."""
    kept = model.zgraph.runtime.updater.states.own()
    return {n: t.clone() for n, t in kept.items() if n.endswith(("/exp_avg", "/exp_avg_sq"))}


@pytest.mark.gloo
@pytest.mark.slow
def test_a_checkpoint_in_a_round_has_the_weights_where_it_began_and_states_of_one_group(
    two: Ranks, tmp_path: Path
) -> None:
    ranks = two.run(saved_in_a_round, tmp_path)
    for began, read, _ in ranks:
        assert all(torch.equal(began[n], read[n]) for n in began)
    (_, _, mine), (_, _, theirs) = ranks
    assert any(not torch.equal(mine[n], theirs[n]) for n in mine)
    alone = zgraph.compile(Net(), plan(mesh={"replicate": 1}))
    alone.load_checkpoint(tmp_path)
    found = states(alone)
    assert all(torch.equal(found[n], mine[n]) for n in mine)  # (a momentum beside another's squares could be anything)


# -- what interrupts a round ------------------------------------------------------------------------------------------
def in_a_round(**fields) -> zgraph.api.handle.Handle:
    model = zgraph.compile(Net(), plan(mesh={"replicate": 1}, **fields))
    for step in range(MIDDLE):
        model.zgraph.train_step(batch(step, 0))
    return model


def test_weights_that_are_written_in_a_round_are_refused() -> None:
    model = in_a_round()
    with torch.no_grad():
        model.gain.mul_(2)
    with pytest.raises(StepError, match="'gain' was written to between two synchronizations"):
        model.zgraph.train_step(batch(0, 0))


def test_states_that_are_removed_in_a_round_are_refused() -> None:
    model = in_a_round()
    model.zgraph.optimizer.state.clear()
    with pytest.raises(StepError, match="states of the optimizer were changed between two synchronizations"):
        model.zgraph.train_step(batch(0, 0))


def test_a_parameter_that_is_frozen_in_a_round_stays_in_it_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = in_a_round()
    model.gain.requires_grad_(False)
    with caplog.at_level(logging.WARNING, "zgraph"):
        for step in range(EVERY):
            model.zgraph.train_step(batch(step, 0))
    assert "'gain' and 0 others have no gradient at the last step of a round" in caplog.text
    assert model.zgraph.runtime.updater.rounds.open().count("gain") == 1
    model.gain.requires_grad_(True)
    while model.zgraph.runtime.updater.calls % EVERY:
        model.zgraph.train_step(batch(0, 0))
    assert model.zgraph.runtime.updater.rounds.open() == []


def test_recompile_keeps_the_round_and_refuses_what_would_lose_it(tmp_path: Path) -> None:
    model = in_a_round()
    with pytest.raises(StepError, match="between two synchronizations of local steps"):
        model.zgraph.recompile(plan(mesh={"replicate": 1}, optimizer=zgraph.SGD(lr=1e-2)))
    with pytest.raises(StepError, match="published between two synchronizations"):
        model.save_pretrained(tmp_path)
    other = in_a_round()
    model.zgraph.recompile(plan(mesh={"replicate": 1}, memory_budget="1GiB"))
    for step in range(EVERY):
        for one in (model, other):
            one.zgraph.train_step(batch(step, 0))
    assert all(torch.equal(weights(model)[n], v) for n, v in weights(other).items())
    with pytest.raises(ModelError, match="can't leave local_steps out"):
        model.zgraph.recompile(zgraph.Plan(mesh={"replicate": 1}, backend="eager", optimizer=zgraph.AdamW(**ADAMW)))


def test_a_state_dict_within_a_round_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model = in_a_round()
    with caplog.at_level(logging.WARNING, "zgraph"):
        model.state_dict()
        model.state_dict()
        zgraph.full_state_dict(model)
    (said,) = [r.getMessage() for r in caplog.records if "within a round of local steps" in r.getMessage()]
    assert (
        said.startswith("state_dict() within a round") and "save_checkpoint saves those where the round began" in said
    )
    for step in range(EVERY - MIDDLE % EVERY):
        model.zgraph.train_step(batch(step, 0))
    caplog.clear()
    model.state_dict()
    assert not caplog.records

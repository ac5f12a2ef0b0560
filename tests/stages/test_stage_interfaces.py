"""What a user does with a compiled model works with one in stages, or is refused with what to do instead."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from sweeps import sweep
from test_stage_checkpoints import STAGED, batch, built, model_of, plan_of, steps
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn.utils import clip_grad_norm_

import zgraph
from zgraph.errors import ModelError, PlanError, StepError, UnsupportedError, ZgraphError
from zgraph.inspection.bundle import read
from zgraph.program.program import InputRole, OutputRole, Port
from zgraph.stages.module_buffers import Buffers
from zgraph.torch_compat import process_groups

pytestmark = pytest.mark.gloo
ALONE: dict[str, Any] = {"mesh": {"dp": 1}, "micro_batches": 4}


def here(values: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Those that are on this rank."""
    return {n: v.detach().clone() for n, v in values.items() if v is not None and not v.is_meta}


def merged(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What ranks have between them; what several have is the same on all."""
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, value in part.items():
            assert name not in found or torch.equal(found[name], value), name
            found[name] = value
    return found


# -- steps ------------------------------------------------------------------------------------------------------------
NUMBERS: dict[str, dict[str, Any]] = {
    "groups, schedule, clipping": {
        "optimizer": zgraph.AdamW(lr=1e-2, decay="matrices", groups=(zgraph.ParamGroup(match="layers.3.*", lr=1e-3),)),
        "lr_schedule": zgraph.Linear(total_steps=9, warmup_steps=2),
        "grad_clip": 0.3,
    },
    "fp16": {"precision": "fp16"},
    "fp16 that overflows at first": {
        "precision": zgraph.Precision(compute="float16", loss_scale={"initial_scale_power": 24})
    },
    "by token": {"loss_average": "token", "optimizer": zgraph.SGD(lr=0.1, momentum=0.9)},
}


def trained(fields: dict[str, Any]) -> tuple[list[float], float | None, int | None, list[float]]:
    """Losses, the loss scale, the steps that were skipped, and the groups' learning rates."""
    model = zgraph.compile(built(), plan_of(**fields))
    losses = []
    for number in range(4):
        words, targets = batch(number)
        targets[1 :: number + 2, 1:] = -100
        losses.append(
            float(model.train_step(targets=targets, words=words) if number % 2 else model.train_step(words, targets))
        )
    handle = model.zgraph
    scale = None if handle.loss_scale is None else float(handle.loss_scale)
    skipped = None if handle.skipped_steps is None else int(handle.skipped_steps)
    return losses, scale, skipped, [g["lr"] for g in handle.optimizer.param_groups]


@sweep("name", NUMBERS, quick=1)
def test_steps_are_those_of_one_process(two, name):
    alone = trained(ALONE | NUMBERS[name])
    low = "fp16" in name
    for losses, *rest in two.run(trained, STAGED | NUMBERS[name]):
        assert losses == pytest.approx(alone[0], rel=2e-3 if low else 1e-5)
        assert rest == list(alone[1:])


def of_the_users_own() -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    """(losses, gradients that two steps have added up, weights after an update, what is said of an optimizer that was made too early)."""
    plain = built()
    early = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    plan = zgraph.Plan(backend="eager", **STAGED)
    model = zgraph.compile(plain, plan, inputs=batch(0))
    with pytest.raises(StepError) as refused:
        early.step()
    late = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = steps(model, range(2))
    grads = here({n: p.grad for n, p in model.named_parameters()})
    late.step()
    late.zero_grad()
    losses += steps(model, range(2, 4))
    return losses, grads, here(dict(model.named_parameters())), str(refused.value)


def test_gradients_add_up_for_an_optimizer_of_the_users_own(two):
    """Over two steps, also those of a parameter that two stages use."""
    plain = built()
    for child in plain.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    for number in range(2):
        for part in zip(*(t.chunk(4) for t in batch(number)), strict=True):
            (plain(*part) / 4).backward()
    found = two.run(of_the_users_own)
    grads = merged([f[1] for f in found])
    wanted = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert grads.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-5, atol=1e-7)
    optimizer.step()
    weights = merged([f[2] for f in found])
    for name, param in plain.named_parameters():
        torch.testing.assert_close(weights[name], param.detach(), rtol=1e-4, atol=1e-6)
    for losses, _, _, said in found:
        assert losses == found[0][0]
        assert "before the model was cut into stages" in said and "another rank has it now" in said


def clipped() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    plan = zgraph.Plan(backend="eager", grad_clip=0.05, **STAGED)
    model = zgraph.compile(built(), plan, inputs=batch(0))
    steps(model, range(1))
    return here({n: p.grad for n, p in model.named_parameters()}), model.zgraph.grad_norms()


def test_the_plan_clips_over_all_stages_what_the_users_optimizer_takes(two):
    plain = built()
    for part in zip(*(t.chunk(4) for t in batch(0)), strict=True):
        (plain(*part) / 4).backward()
    clip_grad_norm_(plain.parameters(), 0.05, foreach=False)
    found = two.run(clipped)
    grads, norms = merged([f[0] for f in found]), merged([f[1] for f in found])
    for name, param in plain.named_parameters():
        if param.grad is not None:
            torch.testing.assert_close(grads[name], param.grad, rtol=1e-5, atol=1e-8)
            torch.testing.assert_close(norms[name], param.grad.norm(), rtol=1e-5, atol=1e-8)


def hooked() -> tuple[list[list[str]], dict[str, torch.Tensor], list[int]]:
    model = model_of(plan_of(**STAGED))
    names, norms = [], []

    def hook(grads: dict[str, torch.Tensor]) -> None:
        names.append(sorted(grads))
        norms.append(model.zgraph.grad_norms())

    remove = model.zgraph.on_gradients(hook)
    steps(model, range(1))
    remove()
    steps(model, range(1))
    return names, norms[0], [len(names)]


@pytest.mark.slow
def test_hooks_see_the_gradients_of_their_stages_and_norms_are_of_the_whole(two):
    plain = built()
    for part in zip(*(t.chunk(4) for t in batch(0)), strict=True):
        (plain(*part) / 4).backward()
    wanted = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    (first, norms, calls), (second, others, _) = two.run(hooked)
    assert calls == [1] and first[0] != second[0]
    assert set(first[0]) | set(second[0]) == wanted.keys() and "embed.weight" in set(first[0]) & set(second[0])
    for name, norm in merged([norms, others]).items():
        torch.testing.assert_close(norm, wanted[name].norm(), rtol=1e-5, atol=1e-8)


def averaged(fields: dict[str, Any]) -> tuple[list[float], list[int]]:
    """The evaluation before training, after it, by the averages, and after that; in each mode."""
    model = zgraph.compile(built(dropout=0.5), plan_of(ema=0.5, **fields))
    found = [float(model.eval_step(*batch(9)))]
    steps(model, range(1))
    steps(model.eval(), range(1, 3))
    model.train()
    with torch.no_grad():
        model.eval()
        found.append(float(model(*batch(9))))
        model.train()
    with model.zgraph.averaged_weights():
        found.append(float(model.eval_step(*batch(9))))
        with pytest.raises(StepError, match="averaged_weights"):
            model.train_step(*batch(0))
    model.zero_grad()
    found.append(float(model.eval_step(*batch(9))))
    return found, [sum(m.training for m in model.modules())]


@pytest.mark.slow
def test_evaluation_and_averages_are_those_of_one_process_on_every_rank(two):
    first, second = two.run(averaged, STAGED)
    assert first == second
    assert first[0][1] == first[0][3] != first[0][2] and first[1][0] > 5
    alone = built(dropout=0.5).eval()
    with torch.no_grad():
        wanted = sum(float(alone(*part)) for part in zip(*(t.chunk(4) for t in batch(9)), strict=True)) / 4
    assert first[0][0] == pytest.approx(wanted, rel=1e-6)


class Two(nn.Module):
    """An output without a loss, in a dict with a number that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x, *, scale=1.0):
        return {"scores": self.b(self.a(x).relu()) * scale, "rows": x.shape[0]}


def with_loss_fn(mesh: dict[str, int]) -> tuple[Any, Any, list[float]]:
    torch.manual_seed(0)
    fields: dict[str, Any] = {"partition": ("b",)} if "pp" in mesh else {}
    plan = plan_of(mesh=mesh, micro_batches=2, **fields)
    model: Any = zgraph.compile(Two(), plan, loss_fn=lambda out, y: (out["scores"] - y).square().mean())
    x, y = torch.arange(16.0).view(4, 4), torch.ones(4, 2)
    out = model.train_step(x, y, scale=0.5)
    shown = model.eval_step(x, scale=0.5)
    model.train_step(x, y, scale=0.5)
    return out, shown, [float(p.detach().double().sum()) for p in model.parameters() if not p.is_meta]


def test_a_loss_function_of_the_users_gets_what_forward_has_no_room_for(two):
    alone = with_loss_fn({"dp": 1})
    first, last = two.run(with_loss_fn, {"pp": 2})
    assert first[0]["rows"] == last[0]["rows"] == alone[0]["rows"]
    for at in (0, 1):
        assert first[at]["scores"] is None
        torch.testing.assert_close(last[at]["scores"], alone[at]["scores"])
    assert first[2] + last[2] == pytest.approx(alone[2], rel=1e-5)


# -- what is refused --------------------------------------------------------------------------------------------------
def refused() -> dict[str, tuple[str, str]]:
    """What each attempt raises: its type, and its words."""
    plan = plan_of(**STAGED)
    uncut, model = zgraph.compile(built(), plan), model_of(plan)
    handle = model.zgraph
    steps(model, range(1))
    attempts = {
        "loop": lambda: model(*batch(0)).backward(),
        "no_sync": lambda: handle.no_sync().__enter__(),
        "step": model.step,
        "optimizer": handle.optimizer.step,
        "forecast": handle.forecast,
        "pickle": lambda: pickle.dumps(model),
        "calibrate": lambda: zgraph.calibrate(built(), plan, batch(0)),
        "cut": lambda: handle.recompile(plan_of(**STAGED | {"partition": ("layers.1",)})),
        "virtual": lambda: handle.recompile(plan_of(**STAGED | {"schedule": "interleaved1f1b"})),
        "mesh": lambda: handle.recompile(plan_of(mesh={"dp": 2})),
        "rows": lambda: model.train_step(*(t[:7] for t in batch(0))),
        "uncut": lambda: uncut.zgraph.report(),
        "uncut step": uncut.step,
        "twice": lambda: zgraph.compile(uncut, plan),
    }
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except ZgraphError as error:
            found[name] = type(error).__name__, str(error)
    assert uncut.zgraph.plan == plan and uncut.zgraph.mesh is not None
    steps(model, range(1, 2))  # (and all is as it was)
    return found


def test_what_stages_cannot_do_is_refused_with_what_to_do_instead(two):
    first, second = two.run(refused)
    assert first == second
    wanted = {
        "loop": (StepError, "train_step(…) is a whole step"),
        "no_sync": (StepError, "micro_batches"),
        "step": (StepError, "train_step"),
        "optimizer": (StepError, "train_step"),
        "forecast": (StepError, "zgraph forecast"),
        "pickle": (ModelError, "can't be pickled"),
        "calibrate": (PlanError, "leave pp out of the mesh"),
        "cut": (ModelError, "other stages"),
        "virtual": (ModelError, "other stages"),
        "mesh": (ModelError, "keeps the mesh {'pp': 2}"),
        "rows": (StepError, "a multiple of 4 rows"),
        "uncut": (StepError, "inputs="),
        "uncut step": (StepError, "inputs="),
        "twice": (ModelError, "compiled already"),
    }
    assert first.keys() == wanted.keys()
    for name, (kind, words) in wanted.items():
        assert first[name][0] == kind.__name__ and words in first[name][1], first[name]


# -- other plans, copies, state dicts -----------------------------------------------------------------------------------
def recompiled(fields: dict[str, Any], others: list[dict[str, Any]]) -> list[float]:
    model = model_of(plan_of(**fields))
    losses = steps(model, range(2))
    for number, other in enumerate(others, 1):
        model.zgraph.recompile(plan_of(**fields | other))
        losses += steps(model, range(2 * number, 2 * number + 2))
    return losses


@pytest.mark.slow
def test_recompile_changes_micro_batches_and_schedule_on_the_way(two):
    alone = recompiled(ALONE, [{"micro_batches": 2}])
    changes = [{"micro_batches": 2, "schedule": "zb"}]
    for losses in two.run(recompiled, STAGED, changes):
        assert losses == pytest.approx(alone, rel=1e-5)


def copied() -> tuple[list[float], list[float], list[float]]:
    model = model_of(plan_of(**STAGED, ema=0.9))
    steps(model, range(2))
    twin = copy.deepcopy(model)
    of_twin = steps(twin, range(2, 4))
    uncut = copy.deepcopy(zgraph.compile(built(), plan_of(**STAGED, ema=0.9)))
    return of_twin, steps(model, range(2, 4)), steps(uncut, range(4))[2:]


@pytest.mark.slow
def test_a_copy_goes_on_apart_from_the_original(two):
    for of_twin, of_model, of_uncut in two.run(copied):
        assert of_twin == of_model == of_uncut


def through_torch(where: str) -> tuple[list[float], list[float], set[str]]:
    """Losses after a torch.distributed.checkpoint, of the run that saved and of one that loaded; the names on the meta device."""
    one, other = (model_of(plan_of(**STAGED)) for _ in range(2))
    steps(one, range(2))

    def held(model: Any) -> dict[str, Any]:
        weights, states = get_state_dict(model, model.zgraph.optimizer)
        return {"model": {n: t for n, t in weights.items() if not t.is_meta}, "optimizer": states}

    dcp.save(held(one), checkpoint_id=where)
    first = steps(one, range(2, 4))
    steps(other, range(5, 6))
    saved = held(other)
    dcp.load(saved, checkpoint_id=where)
    set_state_dict(
        other,
        other.zgraph.optimizer,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
        options=StateDictOptions(strict=False),
    )
    meta = {n for n, t in one.state_dict().items() if t.is_meta}
    assert one.state_dict().keys() == built().state_dict().keys()
    return first, steps(other, range(2, 4)), meta


@pytest.mark.slow
def test_torchs_state_dicts_take_what_is_not_on_the_meta_device(two, tmp_path):
    found = two.run(through_torch, str(tmp_path / "dcp"))
    for first, again, _ in found:
        assert first == again
    meta = [f[2] for f in found]
    assert meta[0] and meta[1] and not meta[0] & meta[1]


# -- what is seen -------------------------------------------------------------------------------------------------------
def looked_at(where: str) -> dict[str, Any]:
    os.environ["ZGRAPH_BUNDLE"] = f"{where}/run"
    try:
        model = model_of(plan_of(**STAGED))
    finally:
        del os.environ["ZGRAPH_BUNDLE"]
    handle = model.zgraph
    steps(model, range(3))
    timings = handle.timings(tokens=48, peak_flops=1e12)
    steps(model, range(2))
    said = str(handle.report())
    assert handle.report().html().startswith("<!doctype html>".upper()) or "<html" in handle.report().html()[:200]
    return {
        "programs": list(handle.programs),
        "updates": list(handle.updates),
        "ways": list(handle.inspect().ways),
        "world": handle.inspect().world,
        "report": said,
        "ranks": len(timings.ranks),
        "text": str(timings),
        "peak": str(handle.explain("peak")),
        "remarks": len(handle.remarks()),
        "mesh": str(handle.mesh.mesh_dim_names),
        "samples": handle.samples,
    }


@pytest.mark.slow
def test_every_view_is_of_this_ranks_stages_among_all_ranks(two, tmp_path):
    first, second = two.run(looked_at, str(tmp_path))
    for at, found in enumerate((first, second)):
        assert found["programs"] == [f"train0.stage{at}"] and found["updates"] == ["update0"]
        assert f"train0.stage{at}" in found["ways"] and found["world"] == 2
        assert f"position {at} of 2 has stage(s) {at} of 2, by schedule 1f1b" in found["report"]
        assert "mesh {'pp': 2}" in found["report"] and "captured in" in found["report"]
        assert found["ranks"] == 2 and "tokens/s" in found["text"]
        assert "bytes" in found["peak"] and "pp" in found["mesh"] and found["samples"] == 5 * 16
    for at, folder in enumerate(("run", "run-pp1")):
        assert any(f"train0.stage{at}" in name for name in read(Path(tmp_path / folder)).ways)


def watched() -> tuple[bool, list[float | None], list[float | None]]:
    """(do the ranks of a stage tell where they are?; the timeouts of votes and transfers while steps run; those that hold while one compiles)."""
    model = model_of(plan_of(**STAGED | {"mesh": {"pp": 2, "dp": 2}}, watch=zgraph.Watch(timeout=50, interval=0.2)))
    steps(model, range(2))
    runtime = model.zgraph.runtime
    groups = [runtime.agreement.group, runtime.everyone.group, runtime.line.up, runtime.line.down]
    groups.append(runtime.mesh.get_group("dp"))

    def limits() -> list[float | None]:
        found = [process_groups.timeout_of(group) for group in groups]
        return [None if limit is None else limit.total_seconds() for limit in found]

    tight = limits()
    runtime.relax()
    return runtime.agreement.heart is runtime.everyone.heart is not None, tight, limits()


@pytest.mark.slow
def test_ranks_of_a_stage_watch_each_other_and_those_of_other_stages():
    with Ranks(4, timeout=120) as ranks:
        for heart, tight, relaxed in ranks.run(watched):
            assert heart
            assert tight == [50.0] * 5
            assert min(limit or 0.0 for limit in relaxed) >= 120.0


# -- buffers --------------------------------------------------------------------------------------------------------------
def stage_with(reads: list[str], changes: list[str]) -> Any:
    return SimpleNamespace(
        inputs=[Port(InputRole.BUFFER, n) for n in reads],
        outputs=[Port(OutputRole.MUTATION, n, 0, InputRole.BUFFER) for n in changes],
    )


def test_a_buffer_is_where_it_is_changed_else_at_the_first_position():
    buffers = Buffers()
    buffers.note("train0", [stage_with(["scale"], []), stage_with(["scale", "mean"], ["mean"])], (0, 1))
    assert buffers.at("scale") == buffers.at("of another") == 0 and buffers.at("mean") == 1


def test_a_buffer_that_another_position_would_read_as_it_was_is_refused():
    buffers = Buffers()
    buffers.note("eval0", [stage_with(["mean"], []), stage_with([], [])], (0, 1))
    with pytest.raises(UnsupportedError, match="'mean' is changed at position 1 of 'pp', and read at \\[0\\]"):
        buffers.note("train1", [stage_with([], []), stage_with(["mean"], ["mean"])], (0, 1))
    assert buffers.at("mean") == 0, "nothing was noted"
    buffers.note("train1", [stage_with(["mean"], ["mean"]), stage_with([], [])], (0, 1))

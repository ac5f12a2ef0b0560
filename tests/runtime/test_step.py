"""`step()` around the update: what is refused, what goes on after a recompile or a copy, and what one can look at."""

from __future__ import annotations

import copy
import logging
import math

import pytest
import torch
from models import Net, batch, built, compiled, equal, weights
from sweeps import product, sweep
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import cross_entropy

import zgraph
from zgraph.errors import ModelError, PlanError, StepError
from zgraph.runtime.timings import uncovered
from zgraph.runtime.train_step import count_targets, split_batch

pytestmark = pytest.mark.core


class TwoBranches(nn.Module):
    """One of two layers is used: the other has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.last = nn.Linear(7, 12), nn.Linear(7, 12), nn.Linear(12, 5)

    def forward(self, x, targets, other: bool):
        hidden = self.other(x) if other else self.one(x)
        return cross_entropy(self.last(torch.tanh(hidden)), targets)


# -- what is refused ------------------------------------------------------------------------------------------------------
def test_step_before_backward_is_refused_and_changes_nothing():
    model = compiled(optimizer=zgraph.AdamW())
    before = weights(model)
    with pytest.raises(StepError, match=r"step\(\) was called before backward\(\)"):
        model.step()
    model(*batch())
    with pytest.raises(StepError, match=r"step\(\) was called before backward\(\)"):
        model.step()
    model(*batch()).backward()
    model.step()
    after = weights(model)
    with pytest.raises(StepError, match=r"step\(\) was called before backward\(\)"):
        model.step()  # a second one without a second backward
    assert not equal(before, after) and equal(after, weights(model))


def test_step_without_an_optimizer_in_the_plan_is_refused():
    model = compiled()
    model(*batch()).backward()
    with pytest.raises(StepError, match="the plan has no optimizer") as caught:
        model.step()
    assert caught.value.where == "optimizer" and model.first.weight.grad is not None


@pytest.mark.parametrize("rows", [7, 9, 1])
def test_a_batch_that_micro_batches_do_not_divide_is_refused_before_anything_ran(rows):
    model = compiled(optimizer=zgraph.SGD(lr=0.1), micro_batches=2)
    before = weights(model)
    with pytest.raises(StepError, match=f"2 micro-batches do not divide a batch of {rows}") as caught:
        model.train_step(*batch(rows))
    assert caught.value.where == "micro_batches" and equal(before, weights(model))
    assert all(p.grad is None for p in model.parameters())


def test_a_batch_smaller_than_the_micro_batches_is_refused_by_token_too():
    model = compiled(micro_batches=4, loss_average="token")
    with pytest.raises(StepError, match="4 micro-batches do not divide a batch of 3"):
        model.train_step(*batch(3))


def test_a_batch_without_a_single_target_is_refused():
    model = compiled(micro_batches=2, loss_average="token")
    x, targets = batch()
    with pytest.raises(StepError, match="no rank has a single target"):
        model.train_step(x, torch.full_like(targets, -100))


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ((zgraph.ParamGroup(match="*.bias"), zgraph.ParamGroup(match="first.*")), "'first.bias' is in two groups"),
        ((zgraph.ParamGroup(match="decoder.*"),), "'decoder.*' matches no parameter"),
    ],
)
def test_groups_that_do_not_fit_the_model_are_refused_by_compile(groups, says):
    with pytest.raises(PlanError, match=says) as caught:
        compiled(optimizer=zgraph.AdamW(groups=groups))
    assert caught.value.where == "optimizer.groups"


@pytest.mark.parametrize("plan", [{"lr_schedule": zgraph.Constant()}, {"ema": 0.9}], ids=["a schedule", "an average"])
def test_what_needs_an_optimizer_is_refused_without(plan):
    with pytest.raises(PlanError) as caught:
        zgraph.Plan(**plan)
    assert caught.value.where in plan


@pytest.mark.parametrize(
    "plan",
    [
        {"optimizer": zgraph.AdamW(groups=(zgraph.ParamGroup(match="nope"),))},
        {"optimizer": zgraph.AdamW(), "lr_schedule": zgraph.TorchSchedule(scheduler="Nothing")},
        {"precision": zgraph.Precision(parameter="bfloat16", keep_fp32=("nope",))},
    ],
    ids=["group", "schedule", "keep_fp32"],
)
def test_a_model_that_is_refused_is_as_it_was(plan):
    model = built()
    before = weights(model)
    with pytest.raises(PlanError):
        zgraph.compile(model, zgraph.Plan(backend="eager", **plan))
    assert equal(before, weights(model)) and not any(m._forward_pre_hooks for m in model.modules())
    zgraph.compile(model, zgraph.Plan(backend="eager", optimizer=zgraph.SGD(lr=0.1))).train_step(*batch())
    assert not equal(before, weights(model))


def test_an_optimizers_bare_name_is_told_how_to_be_written():
    with pytest.raises(PlanError, match="not the name 'AdamW'") as caught:
        zgraph.Plan(optimizer="AdamW")
    assert "zgraph.AdamW" in str(caught.value.hint)


def test_an_error_on_infinite_norms_and_a_loss_scale_do_not_go_together():
    with pytest.raises(PlanError, match="together with a loss scale"):
        zgraph.Plan(
            precision="fp16", optimizer=zgraph.SGD(), grad_clip=zgraph.GradClip(norm=1.0, error_if_nonfinite=True)
        )


def test_a_step_inside_averaged_weights_is_refused():
    model = compiled(optimizer=zgraph.SGD(lr=0.1), ema=0.9)
    model.train_step(*batch())
    model(*batch()).backward()
    with model.zgraph.averaged_weights(), pytest.raises(StepError, match=r"inside averaged_weights"):
        model.step()
    model.step()


@sweep(
    "name, args",
    [
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": 10}),
        ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.1}),
        ("LambdaLR", {"lr_lambda": "math:sqrt"}),
        ("MultiStepLR", {"milestones": [2, 4]}),
    ],
    quick=2,
)
def test_torchs_schedulers_that_look_into_an_optimizer_work(name, args):
    schedule = zgraph.TorchSchedule(scheduler=name, args=args)
    model = compiled(optimizer=zgraph.AdamW(lr=1e-2), lr_schedule=schedule)
    plain = built()
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    given = {"lr_lambda": math.sqrt} if name == "LambdaLR" else args
    scheduler = getattr(torch.optim.lr_scheduler, name)(theirs, **given)
    for seed in range(6):
        model.train_step(*batch(seed=seed))
        plain(*batch(seed=seed)).backward()
        theirs.step()
        theirs.zero_grad()
        scheduler.step()
        assert model.zgraph.optimizer.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    assert equal(weights(model), weights(plain))


def test_a_scheduler_that_torch_does_not_have_is_refused():
    schedule = zgraph.TorchSchedule(scheduler="CosineAnealing", args={"T_max": 3})
    with pytest.raises(PlanError, match="can't be made"):
        compiled(optimizer=zgraph.AdamW(), lr_schedule=schedule)


def test_an_output_without_a_loss_is_refused():
    class Logits(Net):
        def forward(self, x):
            return self.last(self.norm(self.first(x)))

    with pytest.raises(StepError, match="has no loss"):
        compiled(Logits).train_step(batch()[0])
    with pytest.raises(StepError, match="does not take argument 2"):
        compiled(Logits).train_step(*batch())


def test_a_complex_parameter_is_refused_rather_than_left_alone():
    class Complex(Net):
        def __init__(self):
            super().__init__()
            self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    with pytest.raises(PlanError, match="'phase' is complex64"):
        compiled(Complex, optimizer=zgraph.AdamW())


def test_a_decay_that_was_left_out_cannot_be_switched_on():
    model = compiled(optimizer=zgraph.AdamW(weight_decay=0.0))
    model.zgraph.optimizer.param_groups[0]["weight_decay"] = 0.1
    model(*batch()).backward()
    with pytest.raises(PlanError, match="weight_decay of group 0 was 0 in the plan"):
        model.step()


def test_an_infinite_gradient_raises_where_the_plan_says_so():
    clip = zgraph.GradClip(norm=1.0, error_if_nonfinite=True)
    model = compiled(optimizer=zgraph.AdamW(), grad_clip=clip)
    x, targets = batch()
    model.train_step(x, targets)
    before = weights(model)
    with pytest.raises(StepError, match="the norm of the gradients is"):
        model.train_step(x * math.inf, targets)
    assert equal(before, weights(model))
    model.train_step(x, targets)  # those gradients are gone
    assert not equal(before, weights(model))


@sweep(
    "record, key, value",
    [
        (zgraph.SGD(lr=0.1), "maximize", True),
        (zgraph.Muon(), "ns_steps", 3),
        (zgraph.LAMB(), "max_coeff", 0.5),
        (zgraph.AdamW(), "amsgrad", True),
    ],
    quick=2,
)
def test_a_field_that_the_program_was_made_for_cannot_be_changed_in_silence(record, key, value):
    model = compiled(optimizer=record)
    model.train_step(*batch())
    model.zgraph.optimizer.param_groups[0][key] = value
    with pytest.raises(PlanError, match=f"{key} of group 0 was"):
        model.train_step(*batch())


def test_gradients_of_a_refused_step_are_there_for_the_next():
    model, straight = (compiled(optimizer=zgraph.SGD(lr=0.1)) for _ in range(2))
    for m in (model, straight):
        m(*batch()).backward()
    group, before = model.zgraph.optimizer.param_groups[0], weights(model)
    group["maximize"] = True
    with pytest.raises(PlanError, match="maximize of group 0 was"):
        model.step()
    assert equal(before, weights(model)) and all(p.grad is not None for p in model.parameters())
    group["maximize"] = False
    for m in (model, straight):
        m.step()
    assert equal(weights(model), weights(straight)) and all(p.grad is None for p in model.parameters())


def test_a_refused_step_moves_a_schedule_once():
    schedule = zgraph.TorchSchedule(scheduler="StepLR", args={"step_size": 1, "gamma": 0.5})
    scale = zgraph.LossScale(initial_scale_power=4)
    half = zgraph.Precision(parameter="float32", compute="float16", reduce="float32", loss_scale=scale)
    model = compiled(optimizer=zgraph.SGD(lr=0.1), lr_schedule=schedule, precision=half)
    model.train_step(*batch())
    model(*batch()).backward()
    group = model.zgraph.optimizer.param_groups[0]
    group["maximize"] = True
    with pytest.raises(PlanError, match="maximize of group 0 was"):
        model.step()
    group["maximize"] = False
    model.step()
    assert group["lr"] == 0.05


def test_gradients_that_are_only_clipped_stay_when_their_norm_is_infinite():
    model = compiled(grad_clip=zgraph.GradClip(norm=1.0, error_if_nonfinite=True))
    x, targets = batch()
    with pytest.raises(StepError, match="the norm of the gradients is") as caught:
        model.train_step(x * math.inf, targets)
    assert all(p.grad is not None for p in model.parameters()) and "as they were" in str(caught.value.hint)


# -- parameters that have no gradient in some steps -----------------------------------------------------------------------
def test_each_parameter_counts_its_own_updates_as_torch_does():
    model, plain = compiled(TwoBranches, optimizer=zgraph.AdamW(lr=1e-2)), built(TwoBranches)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    for seed, other in enumerate([False, False, True, False, True, True]):
        x, targets = batch(seed=seed)
        model.train_step(x, targets, other)
        plain(x, targets, other).backward()
        theirs.step()
        theirs.zero_grad()
    assert equal(weights(model), weights(plain))
    mine = model.zgraph.optimizer.state
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert float(mine[a]["step"]) == float(theirs.state[b]["step"])
        assert torch.equal(mine[a]["exp_avg"], theirs.state[b]["exp_avg"])


def test_a_parameter_that_is_unfrozen_later_is_updated_from_then_on():
    model, plain = built(), built()
    for m in (model, plain):
        m.first.requires_grad_(False)
    model = zgraph.compile(model, zgraph.Plan(backend="eager", optimizer=zgraph.AdamW(lr=1e-2), ema=0.9))
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    for seed in range(4):
        if seed == 2:
            for m in (model, plain):
                m.first.requires_grad_(True)
        model.train_step(*batch(seed=seed))
        plain(*batch(seed=seed)).backward()
        theirs.step()
        theirs.zero_grad()
        if seed == 1:
            assert equal({"w": model.first.weight}, {"w": built().first.weight})
            assert torch.equal(averages(model)["first.weight"], model.first.weight)
    assert equal(weights(model), weights(plain))


# -- going on ---------------------------------------------------------------------------------------------------------------
PLAN = {"optimizer": zgraph.AdamW(lr=1e-2), "ema": 0.9, "lr_schedule": zgraph.Cosine(total_steps=8, warmup_steps=2)}


def averages(model: nn.Module) -> dict[str, torch.Tensor]:
    with model.zgraph.averaged_weights():
        return weights(model)


def test_a_recompiled_model_goes_on_where_it_was():
    one, other = compiled(**PLAN), compiled(**PLAN)
    for seed in range(6):
        one.train_step(*batch(seed=seed))
        other.train_step(*batch(seed=seed))
        if seed == 2:
            other.zgraph.recompile(zgraph.Plan(backend="eager", zero=1, **PLAN))
    assert equal(weights(one), weights(other)) and equal(averages(one), averages(other))


def test_a_copy_goes_on_by_itself():
    one, straight = compiled(**PLAN), compiled(**PLAN)
    for seed in range(3):
        one.train_step(*batch(seed=seed))
        straight.train_step(*batch(seed=seed))
    twin, before = copy.deepcopy(one), weights(one)
    for seed in range(3, 6):
        twin.train_step(*batch(seed=seed))
        straight.train_step(*batch(seed=seed))
    assert equal(weights(twin), weights(straight)) and equal(averages(twin), averages(straight))
    assert equal(weights(one), before)


def test_half_precision_goes_on_with_its_scale_in_a_copy():
    scale = zgraph.LossScale(initial_scale_power=4, loss_scale_window=2)
    half = zgraph.Precision(parameter="float32", compute="float16", reduce="float32", loss_scale=scale)
    model = compiled(optimizer=zgraph.AdamW(), precision=half)
    for seed in range(3):
        model.train_step(*batch(seed=seed))
    assert float(model.zgraph.loss_scale) == 32.0
    twin = copy.deepcopy(model)
    twin.train_step(*batch())
    twin.train_step(*batch())
    assert float(twin.zgraph.loss_scale) == 64.0 and float(model.zgraph.loss_scale) == 32.0


def test_steps_that_a_copy_skips_are_not_the_models():
    scale = zgraph.LossScale(initial_scale_power=4, hysteresis=1)
    half = zgraph.Precision(parameter="float32", compute="float16", reduce="float32", loss_scale=scale)
    schedule = zgraph.Linear(total_steps=10)
    model = compiled(optimizer=zgraph.SGD(lr=1.0), lr_schedule=schedule, precision=half)
    x, targets = batch()
    model.train_step(x, targets)
    twin = copy.deepcopy(model)
    for _ in range(2):
        twin.train_step(x * math.inf, targets)
    assert int(twin.zgraph.skipped_steps) == 2
    model.train_step(x, targets)
    assert model.zgraph.optimizer.param_groups[0]["lr"] == schedule.at(1, 1.0, 0.0).lr


def test_another_optimizer_says_what_it_leaves_out(caplog):
    model = compiled(optimizer=zgraph.AdamW())
    model.train_step(*batch())
    with caplog.at_level(logging.WARNING, "zgraph"):
        model.zgraph.recompile(zgraph.Plan(backend="eager", optimizer=zgraph.Lion()))
    assert "left out: exp_avg_sq" in caplog.text and "begun anew" not in caplog.text
    model.train_step(*batch())
    assert set(model.zgraph.optimizer.state[model.first.weight]) == {"step", "exp_avg"}


def test_an_optimizer_that_a_recompile_brings_updates_the_weights():
    model, plain = compiled(), built()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, foreach=False)
    model.zgraph.recompile(zgraph.Plan(backend="eager", optimizer=zgraph.SGD(lr=0.1, momentum=0.9)))
    for seed in range(3):
        model.train_step(*batch(seed=seed))
        plain(*batch(seed=seed)).backward()
        theirs.step()
        theirs.zero_grad()
        assert equal(weights(model), weights(plain))
        assert float(model.zgraph.optimizer.state[model.first.weight]["step"]) == seed + 1


def test_an_optimizer_that_a_recompile_brings_takes_low_gradients_that_are_there():
    low = {"precision": "bf16", "numerics": "deepspeed"}
    model = compiled(**low)
    x, targets = batch()
    model(x.bfloat16(), targets).backward()
    before, grad = weights(model), model.first.weight.grad.clone()
    model.zgraph.recompile(zgraph.Plan(backend="eager", optimizer=zgraph.SGD(lr=0.1), **low))
    model.step()
    assert torch.equal(model.first.weight, (before["first.weight"].float() - 0.1 * grad.float()).bfloat16())


def test_an_optimizer_that_comes_back_counts_its_updates_anew():
    """What a plan without an optimizer left out is gone: states, and the counts that belong to them."""
    model = compiled(optimizer=zgraph.AdamW(lr=1e-2))
    for seed in range(3):
        model.train_step(*batch(seed=seed))
    model.zgraph.recompile(zgraph.Plan(backend="eager"))
    model.zgraph.recompile(zgraph.Plan(backend="eager", optimizer=zgraph.AdamW(lr=1e-2)))
    fresh = built()
    fresh.load_state_dict(model.state_dict())
    zgraph.compile(fresh, zgraph.Plan(backend="eager", optimizer=zgraph.AdamW(lr=1e-2)))
    for m in (model, fresh):
        m.train_step(*batch(seed=3))
    assert equal(weights(model), weights(fresh))


EVERY = [
    zgraph.AdamW(lr=1e-2, amsgrad=True),
    zgraph.SGD(lr=0.1),
    zgraph.SGD(lr=0.1, momentum=0.9),
    zgraph.Muon(lr=1e-2),
    zgraph.AdamW8bit(lr=1e-2, min_row_size=4, block_size=4),
]
SCHEDULES = [
    zgraph.Cosine(total_steps=9, warmup_steps=2),
    zgraph.TorchSchedule(scheduler="CosineAnnealingWarmRestarts", args={"T_0": 4}),
]


@product(
    "record, schedule, through",
    EVERY,
    SCHEDULES,
    ["state_dict", "checkpoint"],
    together=1,
    ids=lambda r: r if isinstance(r, str) else f"{r.name} {getattr(r, 'momentum', '')}",
)
def test_a_run_goes_on_from_its_state_dicts_as_if_there_had_been_no_break(record, schedule, through):
    plan = {"optimizer": record, "lr_schedule": schedule, "ema": 0.9}
    one, other = compiled(**plan), compiled(**plan)
    for seed in range(3):
        one.train_step(*batch(seed=seed))
    if through == "state_dict":
        saved = copy.deepcopy((one.state_dict(), one.zgraph.optimizer.state_dict()))
        other.load_state_dict(saved[0])
        other.zgraph.optimizer.load_state_dict(saved[1])
    else:
        saved = copy.deepcopy(get_state_dict(one, one.zgraph.optimizer))
        set_state_dict(other, other.zgraph.optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
    for seed in range(3, 6):
        one.train_step(*batch(seed=seed))
        other.train_step(*batch(seed=seed))
        assert one.zgraph.optimizer.param_groups[0]["lr"] == other.zgraph.optimizer.param_groups[0]["lr"]
    assert equal(weights(one), weights(other)) and equal(averages(one), averages(other))


def test_a_state_dict_of_another_optimizer_is_refused_and_changes_nothing():
    one, other = compiled(optimizer=zgraph.AdamW()), compiled(optimizer=zgraph.SGD(lr=0.1, momentum=0.9))
    for model in (one, other):
        model.train_step(*batch())
    before = one.zgraph.optimizer.state[one.first.weight]["exp_avg"].clone()
    with pytest.raises(ModelError, match="saved state"):
        one.zgraph.optimizer.load_state_dict(other.zgraph.optimizer.state_dict())
    grouped = compiled(optimizer=zgraph.AdamW(groups=(zgraph.ParamGroup(match="*bias", lr=0.1),)))
    with pytest.raises(ModelError, match="groups of"):
        one.zgraph.optimizer.load_state_dict(grouped.zgraph.optimizer.state_dict())
    assert torch.equal(one.zgraph.optimizer.state[one.first.weight]["exp_avg"], before)


def test_asking_for_a_state_dict_before_the_first_step_changes_nothing():
    one, other = compiled(**PLAN), compiled(**PLAN)
    get_state_dict(one, one.zgraph.optimizer)
    assert equal(weights(one), weights(built())) and float(one.zgraph.optimizer.state[one.first.weight]["step"]) == 0
    for model in (one, other):
        model.train_step(*batch())
    assert equal(weights(one), weights(other))


def test_low_weights_that_were_loaded_are_not_undone_by_the_next_update():
    plan = {"precision": "bf16", "numerics": "deepspeed", "optimizer": zgraph.SGD(lr=0.25)}
    one, other = compiled(**plan), compiled(**plan)
    x, targets = batch()
    for _ in range(2):
        one.train_step(x.bfloat16(), targets)
    loaded = {n: p.clone() * 2 for n, p in built().bfloat16().state_dict().items()}
    for model in (one, other):  # one has float32 weights of its own by now
        model.load_state_dict(loaded)
        model.train_step(x.bfloat16(), targets)
    assert equal(weights(one), weights(other))


def test_looking_at_the_average_of_low_weights_does_not_round_it():
    model = compiled(precision="bf16", numerics="deepspeed", optimizer=zgraph.SGD(lr=0.25), ema=0.9)
    x, targets = batch()
    for _ in range(3):
        model.train_step(x.bfloat16(), targets)
    states = model.zgraph.runtime.updater.states
    before = {n: states[f"{n}/ema"].clone() for n, _ in model.named_parameters()}
    now = weights(model)
    with model.zgraph.averaged_weights():
        assert not equal(now, weights(model))
    assert equal(now, weights(model))
    assert all(torch.equal(states[f"{n}/ema"], before[n]) for n in before)


def test_a_schedule_that_wants_a_metric_is_refused():
    schedule = zgraph.TorchSchedule(scheduler="ReduceLROnPlateau")
    with pytest.raises(PlanError, match="wants metrics"):
        compiled(optimizer=zgraph.AdamW(), lr_schedule=schedule)


# -- what one can look at ---------------------------------------------------------------------------------------------------
def test_hooks_see_the_averaged_gradients_and_norms_are_theirs():
    model, plain = compiled(optimizer=zgraph.SGD(lr=0.1), micro_batches=2, grad_clip=1e-3), built()
    seen: list[dict[str, torch.Tensor]] = []
    norms: list[dict[str, torch.Tensor]] = []
    remove = model.zgraph.on_gradients(lambda grads: seen.append({n: g.clone() for n, g in grads.items()}))
    model.zgraph.on_gradients(lambda grads: norms.append(model.zgraph.grad_norms()))
    model.train_step(*batch())
    plain(*batch()).backward()
    for name, p in plain.named_parameters():
        assert (seen[0][name] - p.grad).norm() < 1e-6 * p.grad.norm()  # half batches are summed in another order
        assert abs(norms[0][name] - p.grad.norm()) < 1e-6 * p.grad.norm()
    remove()
    model.train_step(*batch())
    assert len(seen) == 1 and len(norms) == 2


def test_the_average_is_in_place_of_the_weights_only_inside():
    model = compiled(optimizer=zgraph.SGD(lr=0.5), ema=0.5)
    start = weights(model)
    model.train_step(*batch())
    now = weights(model)
    with model.zgraph.averaged_weights():
        inside = weights(model)
        expected = model.eval_step(*batch())
    assert equal(now, weights(model))
    assert all((inside[n] - (start[n] + now[n]) / 2).norm() <= 1e-6 * inside[n].norm() for n in now)
    plain = built()
    plain.load_state_dict(inside)
    assert torch.equal(plain(*batch()), expected)
    with pytest.raises(StepError, match="no average"), compiled(optimizer=zgraph.SGD()).zgraph.averaged_weights():
        pass


def test_hooks_see_averages_under_a_token_average_too():
    model, plain = compiled(optimizer=zgraph.SGD(lr=0.1), micro_batches=4, loss_average="token"), built()
    seen: dict[str, torch.Tensor] = {}
    norms: dict[str, torch.Tensor] = {}
    model.zgraph.on_gradients(lambda grads: seen.update({n: g.clone() for n, g in grads.items()}))
    model.zgraph.on_gradients(lambda grads: norms.update(model.zgraph.grad_norms()))
    model.train_step(*batch())
    plain(*batch()).backward()
    for name, p in plain.named_parameters():
        assert (seen[name] - p.grad).norm() < 1e-6 * p.grad.norm()
        assert abs(norms[name] - p.grad.norm()) < 1e-6 * p.grad.norm()


def test_timings_of_a_loop_with_the_users_own_optimizer():
    model = compiled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        model.eval_step(*batch())  # (is no part of a step)
        for _ in range(2):
            with model.no_sync():
                model(*batch()).backward()
        model(*batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    timings = model.zgraph.timings(peak_flops=1e9)
    (mine,) = timings.ranks
    assert mine["forwards"] == 3 and mine["forward"] > 0 and mine["backward"] > 0
    products = 2 * 8 * (7 * 12 + 12 * 5) * 3 - 2 * 8 * 7 * 12
    assert timings.mfu == pytest.approx(3 * products / mine["step"] / 1e9)
    assert len(model.zgraph.runtime.clock._open) <= 6


def test_timings_tell_the_phases_of_a_step_and_rates_when_asked():
    model = compiled(optimizer=zgraph.AdamW(), micro_batches=2)
    for _ in range(5):
        model.train_step(*batch())
    timings = model.zgraph.timings(tokens=1000, peak_flops=1e9)
    (mine,) = timings.ranks
    assert mine["step"] > 0 and all(mine[k] > 0 for k in ("forward", "backward", "update"))
    for step in model.zgraph.runtime.clock.steps:  # (medians of phases may add up to more than the median step)
        assert step["forward"] + step["backward"] + step["update"] <= step["step"] * 1.001
    assert timings.tokens == pytest.approx(1000 / mine["step"])
    products = 2 * 8 * (7 * 12 + 12 * 5)  # of one forward; a backward has two for each but the first layer's inputs
    flops = products * 3 - 2 * 8 * 7 * 12
    assert timings.mfu == pytest.approx(flops / mine["step"] / 1e9)
    text = str(timings)
    assert all(word in text for word in ("forward", "backward", "update"))


@pytest.mark.parametrize(
    ("spans", "by", "left"),
    [
        ([(0, 10)], [], 10),
        ([(0, 10)], [(0, 10)], 0),
        ([(0, 10)], [(2, 4), (3, 6)], 6),
        ([(0, 10), (5, 15)], [(12, 20)], 12),
        ([(0, 1), (4, 5)], [(1, 4)], 2),
        ([], [(0, 3)], 0),
    ],
)
def test_exposed_is_what_nothing_else_covers(spans, by, left):
    assert uncovered(spans, by) == left


def test_the_reports_and_histories_have_the_update_program():
    model = compiled(optimizer=zgraph.AdamW())
    model.train_step(*batch())
    history = model.zgraph.updates["update0"]
    assert [r.name for r in history.records][-2:] == ["write_in_place", "group_updates"]
    assert "update0" in {part.name for part in model.zgraph.report().parts} or "update0" in str(model.zgraph.report())


# -- what a micro-batch is ----------------------------------------------------------------------------------------------
def test_all_tensors_of_the_batchs_size_are_cut_and_all_else_is_given_whole():
    x, mask, table = torch.arange(12).reshape(6, 2), torch.ones(6, 1, 3), torch.ones(4, 4)
    calls = split_batch((x, {"mask": mask, "table": table}), {"flag": True}, 3, uneven=False)
    assert len(calls) == 3
    for i, ((part, named), keywords) in enumerate(calls):
        assert torch.equal(part, x[2 * i : 2 * i + 2]) and named["mask"].shape == (2, 1, 3)
        assert named["table"] is table and keywords == {"flag": True}
    for rows, parts in ((7, [3, 2, 2]), (5, [2, 2, 1]), (4, [2, 1, 1]), (3, [1, 1, 1])):
        assert [len(args[0]) for args, _ in split_batch((torch.ones(rows, 2),), {}, 3, uneven=True)] == parts


def test_targets_are_those_that_are_not_ignored():
    targets = torch.tensor([[1, -100, 2], [-100, -100, 3]])
    model = built()
    assert count_targets(model, (torch.ones(2, 3), targets), {}) == 3
    assert count_targets(model, (torch.ones(2, 3),), {"targets": targets}) == 3
    assert count_targets(model, (torch.ones(2, 3), torch.ones(2, 3)), {}) == 2  # no integers: rows count
    model.loss_type = "ForCausalLM"
    assert count_targets(model, (torch.ones(2, 3), targets), {}) == 2


def test_a_compiled_model_is_not_compiled_again():
    with pytest.raises(ModelError, match="compiled already"):
        zgraph.compile(compiled(optimizer=zgraph.AdamW()), zgraph.Plan())

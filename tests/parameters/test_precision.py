"""Each tensor of a step has the dtype that the plan says, and half precision never goes wrong in silence.

References are plain PyTorch in the same dtypes. Where both do the same operators in the same order, bits are compared;
else the tolerance is a few roundings of the dtype: 2^-8 for bfloat16, 2^-11 for float16.
"""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
from models import built, compiled, weights
from sweeps import product, sweep
from torch import nn
from torch.nn.functional import mse_loss

import zgraph
from zgraph.build.planned_step import programs
from zgraph.errors import CaptureError, ModelError, OverflowError, PlanError
from zgraph.plan.precision import preset
from zgraph.program import collectives
from zgraph.program.node import info, tensor, tensors

pytestmark = pytest.mark.core

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.last = nn.Linear(10, 3)
        self.register_buffer("shift", torch.linspace(-1, 1, 6))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x + self.shift.to(x.dtype))))).float().square().mean()


class Scaled(nn.Module):
    """The loss is multiplied by an argument: any gradient may be made to overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)

    def forward(self, x, factor):
        return (self.inner(x).float() * factor).mean()


def batch() -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


# -- dtypes in the program ------------------------------------------------------------------------------------------------
def wire(**plan) -> dict[str, set[torch.dtype]]:
    """The dtypes of what is gathered and reduced, and of the gradients that come out, on two ranks."""
    x = batch().bfloat16() if plan.get("numerics") == "deepspeed" else batch()  # where casting is the user's
    history = programs(built(Shifted), zgraph.Plan(backend="eager", **plan), (x,), 2)
    found: dict[str, set[torch.dtype]] = {}
    for node in history.program.nodes:
        if collectives.is_start(node):
            found.setdefault(info(node).role.value, set()).add(tensor(node.all_input_nodes[0]).dtype)
    for port, node in history.program.output_items():
        if port.role.value == "gradient":
            found.setdefault("out", set()).add(tensor(node).dtype)
    return found


@sweep("zero", [0, 1, 3], quick=1)
@pytest.mark.parametrize(
    ("plan", "gather", "reduce"),
    [
        ({}, FP32, FP32),
        ({"precision": "bf16"}, BF16, FP32),
        ({"precision": "fp16", "optimizer": zgraph.AdamW()}, FP16, FP32),
        ({"precision": "bf16", "numerics": "fsdp2"}, BF16, BF16),
        ({"precision": "bf16", "numerics": "deepspeed"}, BF16, BF16),
        ({"precision": zgraph.Precision(compute="bfloat16")}, BF16, BF16),
        ({"precision": zgraph.Precision(reduce="bfloat16")}, FP32, BF16),
    ],
    ids=["fp32", "bf16", "fp16", "fsdp2", "deepspeed", "compute", "reduce"],
)
def test_weights_are_cast_before_the_gather_and_gradients_before_the_reduction(plan, gather, reduce, zero):
    found = wire(zero=zero, **plan)
    assert found["reduce"] == {reduce} and found["out"] == {BF16 if plan.get("numerics") == "deepspeed" else FP32}
    assert found.get("gather", {gather}) == {gather} and ("gather" in found) == (zero > 0)


def test_a_module_that_stays_in_float32_is_gathered_and_reduced_so():
    kept = zgraph.Precision(compute="bfloat16", reduce="bfloat16", keep_fp32=("norm",))
    history = programs(built(Shifted), zgraph.Plan(backend="eager", precision=kept), (batch(),), 2)
    for node in history.program.nodes:
        if collectives.is_start(node):
            name = info(node).param
            assert tensor(node.all_input_nodes[0]).dtype is (FP32 if name.startswith("norm") else BF16), name
    with pytest.raises(PlanError, match="matches no parameter and no module") as caught:
        compiled(Shifted, precision=zgraph.Precision(compute="bfloat16", keep_fp32=("nrom",)))
    assert caught.value.where == "precision.keep_fp32"


# -- numbers --------------------------------------------------------------------------------------------------------------
def test_bf16_is_a_cast_model_with_float32_weights():
    mine = compiled(Shifted, precision="bf16")
    plain = built(Shifted)
    low = copy.deepcopy(plain)
    for p in low.parameters():
        p.data = p.data.bfloat16()
    x = batch()
    loss, expected = mine(x), low(x.bfloat16())
    loss.backward()
    expected.backward()
    assert torch.equal(loss, expected)
    for (name, a), b in zip(mine.named_parameters(), low.parameters(), strict=True):
        assert a.dtype is FP32 and a.grad.dtype is FP32
        assert torch.equal(a.grad, b.grad.float()), name


def test_deepspeeds_bf16_keeps_low_weights_buffers_and_float32_masters():
    mine = compiled(Shifted, precision="bf16", numerics="deepspeed", optimizer=zgraph.SGD(lr=0.25))
    low = built(Shifted).bfloat16()
    masters = [p.detach().float() for p in low.parameters()]  # DeepSpeed makes them of the weights that are low already
    assert mine.shift.dtype is BF16 and mine.seen.dtype is torch.int64
    x = batch().bfloat16()
    for _ in range(3):
        mine.train_step(x)
        low(x).backward()
        for p, master in zip(low.parameters(), masters, strict=True):
            master -= 0.25 * p.grad.float()
            p.data.copy_(master)
            p.grad = None
    updater = mine.zgraph.runtime.updater
    for (name, a), b, master in zip(mine.named_parameters(), low.parameters(), masters, strict=True):
        assert a.dtype is BF16 and torch.equal(a, b), name
        assert torch.equal(updater.states[f"{name}/master"], master)


def test_gradients_of_low_parameters_add_up_in_float32_where_the_plan_updates():
    wide = preset("bf16", "deepspeed").model_copy(update={"accumulate": None})
    mine = compiled(Shifted, precision=wide, optimizer=zgraph.SGD(lr=0.0), micro_batches=4)
    low = built(Shifted).bfloat16()
    seen: dict[str, torch.Tensor] = {}
    mine.zgraph.on_gradients(lambda grads: seen.update({n: g.clone() for n, g in grads.items()}))
    x = batch().bfloat16()
    mine.train_step(x)
    sums = {n: torch.zeros(p.shape) for n, p in low.named_parameters()}
    for part in x.chunk(4):
        (low(part) / 4).backward()
        for n, p in low.named_parameters():
            sums[n] += p.grad.float()
            p.grad = None
    assert all(g.dtype is FP32 and torch.equal(g, sums[n]) for n, g in seen.items()) and seen.keys() == sums.keys()
    own = compiled(
        Shifted, precision="bf16", numerics="deepspeed"
    )  # torch's optimizers want a gradient of the parameter's dtype
    own(x).backward()
    assert own.first.weight.grad.dtype is BF16
    torch.optim.AdamW(own.parameters()).step()


@sweep("clip", [None, 0.05], quick=1)
def test_gradients_add_up_in_bfloat16_with_deepspeeds_numerics(clip):
    """Each sum is rounded; the norm, the clipping and the update are in float32."""
    low = {"precision": "bf16", "numerics": "deepspeed"}
    plan = zgraph.Plan(backend="eager", **low, optimizer=zgraph.SGD(lr=0.25), micro_batches=4, grad_clip=clip)
    mine = zgraph.compile(built(Shifted), plan)
    plain = built(Shifted).bfloat16()
    masters = {n: p.detach().float() for n, p in plain.named_parameters()}
    seen: dict[str, torch.Tensor] = {}
    mine.zgraph.on_gradients(lambda grads: seen.update({n: g.clone() for n, g in grads.items()}))
    x = batch().bfloat16()
    mine.train_step(x)
    for part in x.chunk(4):
        (plain(part) / 4).backward()  # (autograd adds up in the parameter's dtype)
    sums = {n: p.grad for n, p in plain.named_parameters()}
    assert all(g.dtype is BF16 and torch.equal(g, sums[n]) for n, g in seen.items()) and seen.keys() == sums.keys()
    norm = torch.stack([g.float().norm() for g in sums.values()]).norm()
    factor = 1.0 if clip is None else min(1.0, clip / (float(norm) + 1e-6))
    for name, master in masters.items():
        wanted = master - 0.25 * factor * sums[name].float()
        torch.testing.assert_close(mine.zgraph.runtime.updater.states[f"{name}/master"], wanted, rtol=1e-6, atol=1e-7)
    assert clip is None or factor < 1.0


def test_what_gradients_can_not_be_accumulated_in_is_refused():
    for values in (
        {},
        {"optimizer": zgraph.AdamW(), "precision": half().model_copy(update={"accumulate": "bfloat16"})},
    ):
        with pytest.raises(PlanError) as caught:
            zgraph.Plan(**{"precision": zgraph.Precision(compute="bfloat16", accumulate="bfloat16"), **values})
        assert caught.value.where == "precision.accumulate" and caught.value.hint
    with pytest.raises(PlanError):
        zgraph.Precision(compute="float16", accumulate="float16")


@product("zero, micro_batches", [0, 1, 2, 3], [1, 3], together=1)
def test_verify_finds_gradients_that_are_accumulated_in_bfloat16_to_be_plain_pytorchs(zero, micro_batches):
    plan = zgraph.Plan(
        backend="eager",
        zero=zero,
        precision="bf16",
        numerics="deepspeed",
        optimizer=zgraph.AdamW(),
        micro_batches=micro_batches,
        grad_clip=1.0,
    )
    assert zgraph.verify(built(Shifted), plan, world=4, inputs=(torch.randn(12, 6).bfloat16(),)).ok


def test_optimizer_states_may_be_low():
    mine = compiled(Shifted, precision=zgraph.Precision(optimizer_state="bfloat16"), optimizer=zgraph.AdamW())
    mine.train_step(batch())
    states = mine.zgraph.optimizer.state[mine.first.weight]
    assert states["exp_avg"].dtype is states["exp_avg_sq"].dtype is BF16 and mine.first.weight.dtype is FP32


def test_the_models_own_autocast_is_respected():
    class Auto(Shifted):
        def forward(self, x):
            with torch.autocast("cpu", dtype=BF16):
                return super().forward(x)

    mine, plain = compiled(Auto), built(Auto)
    loss, expected = mine(batch()), plain(batch())
    loss.backward()
    expected.backward()
    assert torch.equal(loss, expected) and not torch.equal(expected, built(Shifted)(batch()))
    for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@functools.cache
def last_loss(**plan: str | None) -> float:
    """After 150 steps of a small regression."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
    mine = zgraph.compile(model, zgraph.Plan(backend="eager", optimizer=zgraph.AdamW(lr=1e-2), **plan))
    dtype = next(mine.parameters()).dtype  # with DeepSpeed's numerics inputs are the user's to cast
    generator = torch.Generator().manual_seed(3)
    for _ in range(150):
        x = torch.randn(64, 6, generator=generator)
        loss = mse_loss(mine(x.to(dtype)).float(), torch.sin(x.sum(1, keepdim=True)))
        loss.backward()
        mine.step()
    return float(loss.detach())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@sweep("numerics", [None, "fsdp2", "deepspeed"], quick=1)
def test_half_precision_trains_as_float32_does(precision, numerics):
    low, whole = last_loss(precision=precision, numerics=numerics), last_loss()
    assert whole < 0.3 and abs(low - whole) < 0.03


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))

    def forward(self, x):
        return super().forward(x).float().square().mean()


@pytest.mark.parametrize(
    "plan", [{"precision": "bf16"}, {"precision": "fp16"}, {"precision": "bf16", "numerics": "fsdp2"}]
)
def test_batch_norms_with_float32_statistics_stay_in_float32(plan):
    mine = compiled(Convolutions, optimizer=zgraph.SGD(lr=0.1), **plan)
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    assert mine.train_step(x).isfinite() and mine[1].running_mean.dtype is FP32
    plain = built(Convolutions)
    plain(x)
    assert (mine[1].running_mean - plain[1].running_mean).abs().max() < 2**-8


def nodes(program) -> list[tuple[str, list[tuple[torch.dtype, torch.Size]]]]:
    return [(str(n.target), [(t.dtype, t.shape) for t in tensors(n)]) for n in program.nodes]


@sweep(
    "plan",
    [
        {"precision": "bf16"},
        {"precision": "bf16", "numerics": "deepspeed"},
        {"precision": zgraph.Precision(compute="bfloat16", buffer="bfloat16", keep_fp32=("0",))},
    ],
    ids=["statistics in float32", "all in bfloat16", "a pattern"],
    quick=2,
)
def test_the_program_that_is_dumped_is_the_one_that_runs(plan):
    plan = zgraph.Plan(backend="eager", **plan)
    x = torch.randn(4, 3, 8, 8, dtype=BF16 if plan.numerics == "deepspeed" else FP32)
    model = built(Convolutions)
    buffers = {n: (b, b.dtype) for n, b in model.named_buffers()}
    dumped = programs(model, plan, (x,), 1)
    assert all(b is buffers[n][0] and b.dtype is buffers[n][1] for n, b in model.named_buffers())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    mine = zgraph.compile(model, plan, inputs=(x,)).zgraph.programs["train0"].history()
    assert nodes(dumped.records[0].program) == nodes(mine.records[0].program)
    assert nodes(dumped.program) == nodes(mine.program)


def test_a_pattern_that_matches_nothing_is_refused_before_a_program_is_dumped():
    plan = zgraph.Plan(precision=zgraph.Precision(compute="bfloat16", keep_fp32=("nrom",)))
    with pytest.raises(PlanError, match="matches no parameter and no module"):
        programs(built(Shifted), plan, (batch(),), 2)


def test_a_model_that_can_not_be_dumped_is_as_it_was():
    model = built(Convolutions)
    with pytest.raises(CaptureError):
        programs(model, zgraph.Plan(precision="bf16"), (torch.randn(4, 5),), 2)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("pattern", ["*.bias", "norm.weight", "first.weight"])
def test_a_pattern_of_one_parameter_keeps_its_whole_module(pattern):
    kept = zgraph.Precision(compute="bfloat16", keep_fp32=(pattern,))
    mine = compiled(Shifted, precision=kept, optimizer=zgraph.SGD(lr=0.1))
    assert mine.train_step(batch()).isfinite()


def test_a_module_that_stays_may_return_any_structure():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.LSTM(6, 5), nn.Linear(5, 2)

        def forward(self, x):
            hidden, (state, _) = self.inner(x)
            return (self.last(hidden) + self.last(state)).float().mean()

    kept = zgraph.Precision(compute="bfloat16", keep_fp32=("inner",))
    assert compiled(Recurrent, precision=kept)(batch()[None]).isfinite()


def test_half_precision_by_its_parameters_alone_has_a_scale_and_refuses_what_it_cannot_hold():
    low = zgraph.Precision(parameter="float16", cast_inputs=False)
    mine = compiled(Shifted, precision=low, optimizer=zgraph.SGD(lr=0.1))
    mine.train_step(batch().half())
    assert float(mine.zgraph.loss_scale) > 0
    model = built(Shifted)
    model.first.weight.data[0] = 1e6
    with pytest.raises(ModelError, match="float16 can't hold"):
        zgraph.compile(model, zgraph.Plan(backend="eager", precision=low, optimizer=zgraph.SGD()))


# -- fp16 -----------------------------------------------------------------------------------------------------------------
def half(**scale) -> zgraph.Precision:
    return zgraph.Precision(
        parameter="float32", compute="float16", reduce="float32", loss_scale=zgraph.LossScale(**scale)
    )


def test_gradients_are_never_scaled_to_the_user():
    mine = compiled(Shifted, precision=half(initial_scale_power=12), optimizer=zgraph.SGD(lr=0.0))
    plain = built(Shifted)
    seen = {}
    mine.zgraph.on_gradients(lambda grads: seen.update({n: g.clone() for n, g in grads.items()}))
    mine.train_step(batch())
    plain(batch()).backward()
    for name, p in plain.named_parameters():
        assert (seen[name] - p.grad).norm() < 2**-9 * max(p.grad.norm(), 1e-2), name


def test_small_gradients_are_saved_by_the_scale():
    x = torch.ones(8, 6)
    tiny = torch.tensor(2.0**-22)  # the mean's tangent is 2^-27 of each element: float16 ends at 2^-24
    ends = []
    for power in (0, 12):
        mine = compiled(Scaled, precision=half(initial_scale_power=power), optimizer=zgraph.SGD(lr=1.0))
        before = mine.inner.weight.detach().clone()
        mine.train_step(x, tiny)
        ends.append(float((mine.inner.weight - before).abs().max()))
    assert ends[0] == 0.0 and ends[1] > 0.0


def test_a_step_that_overflows_is_skipped_and_counted_and_the_next_one_is_not():
    mine = compiled(Scaled, precision=half(initial_scale_power=4, hysteresis=1), optimizer=zgraph.AdamW(lr=0.1))
    x = batch()
    mine.train_step(x, torch.tensor(1.0))
    before = weights(mine)
    mine.train_step(x, torch.tensor(math.inf))
    assert all(torch.equal(p, before[n]) for n, p in mine.named_parameters())
    assert int(mine.zgraph.skipped_steps) == 1 and float(mine.zgraph.loss_scale) == 8.0
    mine.train_step(x, torch.tensor(1.0))
    assert not any(torch.equal(p, before[n]) for n, p in mine.named_parameters())
    assert float(mine.zgraph.optimizer.state[mine.inner.weight]["step"]) == 2


def test_skipped_steps_do_not_move_the_schedule():
    schedule = zgraph.Linear(total_steps=10)
    mine = compiled(Scaled, precision=half(initial_scale_power=4), optimizer=zgraph.SGD(lr=1.0), lr_schedule=schedule)
    rates = []
    for factor in (1.0, math.inf, 1.0, 1.0):
        mine.train_step(batch(), torch.tensor(factor))
        rates.append(mine.zgraph.optimizer.param_groups[0]["lr"])
    assert rates == [schedule.at(k, 1.0, 0.0).lr for k in (0, 1, 1, 2)]


def test_at_the_smallest_scale_an_error_says_so():
    mine = compiled(Scaled, precision=half(initial_scale_power=0, hysteresis=1), optimizer=zgraph.SGD(lr=1.0))
    before = mine.inner.weight.detach().clone()
    mine.train_step(batch(), torch.tensor(math.inf))
    with pytest.raises(OverflowError, match="at its minimum") as caught:
        mine.train_step(batch(), torch.tensor(1.0))
    assert caught.value.where == "precision.loss_scale.min_loss_scale"
    assert torch.equal(mine.inner.weight, before)


@pytest.mark.parametrize("value", [math.inf, math.nan, 7e4])
def test_a_parameter_that_float16_cannot_hold_is_refused(value):
    model = built(Shifted)
    with torch.no_grad():
        model.norm.weight[3] = value
    before = weights(model)
    with pytest.raises(ModelError, match=r"'norm\.weight' has values that float16 can't hold"):
        zgraph.compile(model, zgraph.Plan(backend="eager", precision="fp16", optimizer=zgraph.AdamW()))
    assert all(torch.equal(p, before[n]) or value != value for n, p in model.named_parameters())
    zgraph.compile(model, zgraph.Plan(backend="eager", precision="bf16"))  # nothing was done to it


def test_fp16_without_an_optimizer_in_the_plan_is_refused_before_training_only():
    mine = compiled(Shifted, precision="fp16")
    with pytest.raises(PlanError, match="needs an optimizer in the plan"):
        mine(batch())
    assert mine.eval_step(batch()).isfinite()


def test_a_buffer_that_makes_activations_float32_is_told_with_the_line():
    class Promoted(Shifted):
        def forward(self, x):
            return self.last(self.first(x + self.shift)).mean()

    mine = compiled(Promoted, precision="bf16")
    with pytest.raises(CaptureError, match="multiplies bfloat16 and float32") as caught:
        mine(batch())
    assert __file__ in str(caught.value.where) and "buffers" in str(caught.value.hint)
    low = zgraph.Precision(compute="bfloat16", buffer="bfloat16")
    assert compiled(Promoted, precision=low)(batch()).dtype is BF16


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"precision": "fp8"}, "precision"),
        ({"precision": {"compute": "int8"}}, "precision.compute"),
        ({"precision": {"compte": "bfloat16"}}, "precision.compte"),
        ({"precision": "bf16", "numerics": "megatron"}, "numerics"),
    ],
)
def test_precisions_that_do_not_exist_are_refused(values, where):
    with pytest.raises(PlanError) as caught:
        zgraph.Plan.model_validate(values)
    assert caught.value.where == where


@product("precision, numerics, zero", ["bf16", "fp16"], [None, "fsdp2", "deepspeed"], [0, 2, 3], together=1)
def test_verify_finds_mixed_precision_to_be_plain_pytorchs(precision, numerics, zero):
    plan = zgraph.Plan(
        backend="eager", zero=zero, precision=precision, numerics=numerics, optimizer=zgraph.AdamW(), micro_batches=2
    )
    x = batch().to({"bf16": BF16, "fp16": FP16}[precision]) if numerics == "deepspeed" else batch()
    assert zgraph.verify(built(Shifted), plan, world=4, inputs=(x,)).ok

"""A step that is not finite is what the plan says: skipped without a trace, an error that names where it began, or a way back.

Functions at the top of this file run on the ranks.
"""

from __future__ import annotations

import copy
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sweeps import in_turn, product, sweep
from torch import nn

import zgraph
from zgraph.errors import NonFiniteError, OverflowError, PlanError, RolledBackError, StepError

SOURCE = Path(__file__).read_text().splitlines()


def line(mark: str) -> str:
    """The file and line that ends with this comment."""
    return next(f"{__file__}:{i}" for i, text in enumerate(SOURCE, 1) if text.endswith(f"# {mark}"))


class Grows(nn.Module):
    """Infinite for large inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return torch.exp(self.layer(x).abs())  # forward


class Root(nn.Module):
    """No derivative at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return torch.sqrt((self.layer(x) * x).abs())  # backward


class Attention(nn.Module):
    """A mask of infinities, as it should be; a row without anything to look at is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        h = self.layer(x)
        scores = (h[:, :, None] * h[:, None, :]).masked_fill(torch.eye(6, dtype=torch.bool), -math.inf)
        scores = scores.masked_fill((x.sum(1) > 1e6)[:, None, None], -math.inf)
        return (scores.softmax(-1) @ h[:, :, None]).squeeze(-1)  # mask


class Net(nn.Module):
    """`first` and `last` around a part; a norm with buffers, and dropout."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(6)
        self.parts = nn.ModuleList([nn.Tanh(), part])
        self.drop = nn.Dropout(0.25)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        h = self.parts[0](self.first(x))
        h = self.parts[1](x)[:, :6] + self.drop(h)
        return self.last(h).square().mean()


def compiled(part: type[nn.Module] = Grows, **plan: Any) -> nn.Module:
    torch.manual_seed(0)
    given = {"backend": "eager", "optimizer": zgraph.AdamW(lr=0.01)} | plan
    return zgraph.compile(Net(part()), zgraph.Plan(**given))


def good(rows: int = 8, seed: int = 0) -> torch.Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(100 * rank + seed))


def bad(row: int = 0, value: float = 1e7, rows: int = 8) -> torch.Tensor:
    """One row is too large, or (for `Root`) 0."""
    batch = good(rows)
    batch[row] = value
    return batch


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights, buffers and optimizer states of this rank, copied."""
    found = {n: p.detach() for n, p in model.named_parameters()} | dict(model.named_buffers())
    for number, held in enumerate(model.zgraph.optimizer.state.values()):
        found |= {f"{number}/{key}": value for key, value in held.items()}
    return {n: (t.to_local() if hasattr(t, "to_local") else t).clone() for n, t in found.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


# -- on one process ---------------------------------------------------------------------------------------------------
BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.inductor)]
PLANS = [
    {},
    {"grad_clip": 1.0},
    {"micro_batches": 2},
    {"ema": 0.9, "loss_average": "token", "micro_batches": 2},
    {"precision": "bf16"},
    {"offload": {"optimizer": "nvme:/tmp"}},
    {"zero": 3, "offload": {"parameters": "nvme:/tmp", "optimizer": "nvme:/tmp", "activations": "nvme:/tmp"}},
]


@pytest.mark.core
@sweep("plan, mode", [(p, m) for p in PLANS for m in ("skip", "stop", "rollback")], quick=2, ids=str)
def test_such_a_step_leaves_weights_states_and_buffers_bit_for_bit(plan, mode):
    model = compiled(on_nonfinite=mode, **plan)
    for seed in range(3):
        model.train_step(good(seed=seed))
    before = state(model)
    for number in range(2):
        if mode == "skip":
            model.train_step(bad())
        else:
            with pytest.raises(NonFiniteError):
                model.train_step(bad())
        assert same(before, state(model))
        assert int(model.zgraph.skipped_steps) == number + 1
    model.train_step(good())
    assert not same(before, state(model)) and int(model.zgraph.skipped_steps) == 2
    assert all(t.isfinite().all() for t in state(model).values())


@pytest.mark.core
def test_skipped_steps_are_none_for_the_rest():
    """A run with a skipped step is, bit for bit, the run without it; schedules do not move either."""
    plan = {"on_nonfinite": "skip", "lr_schedule": zgraph.WarmupLR(warmup_num_steps=10)}
    with_it, without = compiled(**plan), compiled(**plan)
    for seed in range(4):
        for model in (with_it, without):
            torch.manual_seed(seed)
            model.train_step(good(seed=seed))
        if seed == 1:
            with_it.train_step(bad())
    assert same(state(with_it), state(without))


@pytest.mark.core
@sweep("plan, mode", in_turn(PLANS, ["skip", "stop", "rollback"]), quick=(3,), ids=str)
def test_a_healthy_run_is_bit_for_bit_that_without_the_option(plan, mode):
    ends = []
    for choice in ("ignore", mode):
        model = compiled(on_nonfinite=choice, **plan)
        torch.manual_seed(1)
        losses = [model.train_step(good(seed=seed)) for seed in range(4)]
        ends.append(state(model) | {"losses": torch.stack(losses)})
    assert same(*ends)


@pytest.mark.core
def test_without_the_option_the_weights_are_lost():
    model = compiled()
    assert model.zgraph.skipped_steps is None
    model.train_step(bad())
    assert not all(t.isfinite().all() for t in state(model).values())


@sweep(
    "part, value, module, phase, mark, micro_batches, backend",
    [
        pytest.param(*where, *how, marks=[pytest.mark.inductor] if "inductor" in how else [])
        for how in [(1, "eager"), (2, "eager"), (2, "inductor")]
        for where in [
            (Grows, 1e7, "parts.1", "forward", "forward"),
            (Root, 0.0, "parts.1", "backward", "backward"),
            (Attention, 1e7, "parts.1", "forward", "mask"),
        ]
    ],
    quick=(2, 3, 4),
)
def test_the_first_module_is_named_with_its_line_and_micro_batch(
    part, value, module, phase, mark, micro_batches, backend
):
    model = compiled(part, on_nonfinite="stop", micro_batches=micro_batches, backend=backend)
    model.train_step(good())
    buffers, random = state(model), torch.get_rng_state()
    with pytest.raises(NonFiniteError, match=f"step 2 is not finite in module {module} ") as caught:
        model.train_step(bad(row=6, value=value))
    error = caught.value
    found = (error.step, error.module, error.phase, error.where, error.rank, error.micro_batch)
    assert found == (2, module, phase, line(mark), 0, micro_batches - 1)
    assert same(buffers, state(model)) and not torch.equal(random, torch.get_rng_state())
    model.train_step(good())


@sweep("backend", BACKENDS, quick=(0,))
def test_dropout_is_the_same_when_the_step_runs_again(backend):
    """Whether a step is finite depends on one random number."""

    class Chance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop = nn.Linear(1, 1), nn.Dropout(0.5)

        def forward(self, x):
            return (self.layer(x) / self.drop(x)).sum()

    model = zgraph.compile(Chance(), zgraph.Plan(backend=backend, on_nonfinite="stop", optimizer=zgraph.SGD(lr=0.0)))
    explained = 0
    for seed in range(24):
        torch.manual_seed(seed)
        try:
            model.train_step(torch.ones(1, 1))
        except NonFiniteError as error:
            explained += 1
            assert error.node is not None, error
    assert 4 < explained < 20


@pytest.mark.core
def test_an_input_and_a_weight_that_were_so_before_are_named():
    model = compiled(on_nonfinite="stop")
    with pytest.raises(NonFiniteError, match="which the model was given"):
        model.train_step(bad(value=math.nan))
    with torch.no_grad():
        model.last.weight[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match=r"parameter last\.weight, before the step") as caught:
        model.train_step(good())
    assert caught.value.module == "last"


@pytest.mark.core
def test_a_loss_of_a_function_of_ones_own_is_told():
    torch.manual_seed(0)
    plan = zgraph.Plan(backend="eager", on_nonfinite="stop", optimizer=zgraph.SGD())
    lost = {
        "loss": lambda out: out.mean() + math.inf,
        "gradient": lambda out: (out - out.detach()).abs().pow(0.5).mean(),
    }
    model = zgraph.compile(nn.Linear(4, 2), plan, loss_fn=lambda out: lost["loss"](out))
    with pytest.raises(NonFiniteError, match="the loss, which was computed outside of the model, of finite outputs"):
        model.train_step(torch.ones(2, 4))
    lost["loss"] = lost["gradient"]
    with pytest.raises(NonFiniteError, match="the gradient that came into the backward from outside"):
        model.train_step(torch.ones(2, 4))


@pytest.mark.core
@pytest.mark.parametrize("mode", ["skip", "stop"])
def test_a_loss_that_is_infinite_counts_though_its_gradients_are_finite(mode):
    class Shifted(nn.Linear):
        def forward(self, x):
            return super().forward(x).mean() + 1.0 / x.detach().min()

    torch.manual_seed(0)
    plan = zgraph.Plan(backend="eager", on_nonfinite=mode, optimizer=zgraph.SGD(lr=0.1))
    model = zgraph.compile(Shifted(4, 2), plan)
    weight = model.weight.detach().clone()
    if mode == "skip":
        model(torch.zeros(2, 4)).backward()
        assert model.weight.grad.isfinite().all()
        model.step()
    else:
        with pytest.raises(NonFiniteError, match="infinite"):
            model.train_step(torch.zeros(2, 4))
    assert torch.equal(weight, model.weight) and int(model.zgraph.skipped_steps) == 1


@pytest.mark.core
@product("of, mode", ["parameters", "model", "optimizer"], ["skip", "stop"], together=1)
def test_what_was_thrown_away_does_not_count(of, mode):
    """Whether gradients are gone then, or zeros."""
    model = compiled(on_nonfinite=mode)
    model(bad()).backward()
    if of == "parameters":
        for param in model.parameters():
            param.grad = None
    else:
        (model if of == "model" else model.zgraph.optimizer).zero_grad(set_to_none=False)
        assert all(not param.grad.any() for param in model.parameters())
    model(good()).backward()
    model.step()
    assert int(model.zgraph.skipped_steps) == 0


@pytest.mark.core
def test_a_copy_throws_its_own_gradients_away():
    model = compiled(on_nonfinite="stop")
    twin = copy.deepcopy(model)
    for one in (model, twin):
        one(bad()).backward()
    twin.zero_grad()
    assert all(p.grad is None for p in twin.parameters()) and all(p.grad is not None for p in model.parameters())
    with pytest.raises(NonFiniteError):
        model.step()
    twin(good()).backward()
    twin.step()


@pytest.mark.core
def test_a_loop_of_ones_own_that_fills_the_same_tensor_again():
    model = compiled(on_nonfinite="stop")
    batch = bad()
    with model.no_sync():
        (model(batch) / 2).backward()
    batch.copy_(good())
    (model(batch) / 2).backward()
    with pytest.raises(NonFiniteError) as caught:
        model.step()
    assert (caught.value.micro_batch, caught.value.where) == (0, line("forward"))


# -- half precision ---------------------------------------------------------------------------------------------------
SCALE = {"parameter": "float32", "compute": "float16"}


def halved(mode: str, **scale: Any) -> nn.Module:
    record = zgraph.Precision(**SCALE, loss_scale=zgraph.LossScale(**scale))
    return compiled(Root, on_nonfinite=mode, precision=record, optimizer=zgraph.SGD(lr=0.01))


@pytest.mark.core
@sweep("mode", ["skip", "stop", "rollback"], quick=1)
def test_an_overflow_is_the_loss_scales_business(mode):
    plain, mine = (
        halved("ignore", initial_scale_power=30, hysteresis=1),
        halved(mode, initial_scale_power=30, hysteresis=1),
    )
    for model in (plain, mine):
        for _ in range(4):
            torch.manual_seed(0)
            model.train_step(good())
    assert int(mine.zgraph.skipped_steps) == int(plain.zgraph.skipped_steps) > 0
    assert float(mine.zgraph.loss_scale) == float(plain.zgraph.loss_scale) and same(state(plain), state(mine))


@pytest.mark.core
def test_a_scale_that_is_exhausted_stops():
    scale = {"initial_scale_power": 1, "min_loss_scale": 2.0, "hysteresis": 1}
    model = halved("stop", **scale)
    with pytest.raises(NonFiniteError, match=r"not finite in module parts\.1") as caught:
        model.train_step(bad(value=0.0))
    assert caught.value.phase == "backward"
    model = halved("skip", **scale)
    model.train_step(bad(value=0.0))
    with pytest.raises(OverflowError):
        model.train_step(good())


@pytest.mark.core
def test_a_loss_that_is_not_finite_stops_at_any_scale():
    model = halved("stop", initial_scale_power=8)
    with pytest.raises(NonFiniteError):
        model.train_step(bad(value=math.nan))
    assert int(model.zgraph.skipped_steps) == 1 and float(model.zgraph.loss_scale) <= 2.0**8


# -- rolling back -----------------------------------------------------------------------------------------------------
@pytest.mark.core
@product("loaded, async_", [False, True], [False, True], together=1)
def test_rollback_restores_bit_for_bit_and_training_goes_on(tmp_path, async_, loaded):
    model = compiled(on_nonfinite="rollback")
    model.train_step(good(seed=0))
    model.save_checkpoint(tmp_path, "here", {"batch": 1}, async_=async_)
    saved = state(model)
    expected = [model.train_step(good(seed=seed)) for seed in (1, 2)]
    if loaded:
        model.zgraph.finish()
        model = compiled(on_nonfinite="rollback")
        model.load_checkpoint(tmp_path)
        for seed in (1, 2):
            model.train_step(good(seed=seed))
    with pytest.raises(RolledBackError, match=r"in module parts\.1") as caught:
        model.train_step(bad())
    error = caught.value
    assert (error.tag, error.client_state, error.lost, error.step) == ("here", {"batch": 1}, 3, 4)
    assert error.where == line("forward") and "2 step" not in error.hint and "3 step(s) ago" in error.hint
    assert same(saved, state(model))
    assert [float(model.train_step(good(seed=s))) for s in (1, 2)] == [float(loss) for loss in expected]


@pytest.mark.core
def test_rollback_without_a_checkpoint_is_stop_and_says_so():
    model = compiled(on_nonfinite="rollback")
    with pytest.raises(NonFiniteError, match="no checkpoint yet") as caught:
        model.train_step(bad())
    assert not isinstance(caught.value, RolledBackError)


@pytest.mark.core
def test_rollback_to_a_damaged_checkpoint_is_stop_and_says_so(tmp_path):
    model = compiled(on_nonfinite="rollback")
    model.train_step(good())
    model.save_checkpoint(tmp_path, "here")
    for file in (tmp_path / "here").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-8])
    before = state(model)
    with pytest.raises(NonFiniteError, match="could not be loaded to roll back to") as caught:
        model.train_step(bad())
    assert not isinstance(caught.value, RolledBackError) and same(before, state(model))


@pytest.mark.core
def test_counts_of_skipped_steps_are_saved_and_go_on_after_a_recompile(tmp_path):
    model = compiled(on_nonfinite="skip")
    model.train_step(good())
    model.train_step(bad())
    model.save_checkpoint(tmp_path)
    other = compiled(on_nonfinite="skip")
    other.load_checkpoint(tmp_path)
    assert int(other.zgraph.skipped_steps) == 1
    other.zgraph.recompile(other.zgraph.plan.model_copy(update={"on_nonfinite": "stop", "micro_batches": 2}))
    other.train_step(good())
    assert int(other.zgraph.skipped_steps) == 1
    with pytest.raises(NonFiniteError, match="step 4"):
        other.train_step(bad())


# -- plans ------------------------------------------------------------------------------------------------------------
@pytest.mark.core
@pytest.mark.parametrize(
    "plan",
    [
        {"on_nonfinite": "stop", "optimizer": None},
        {"on_nonfinite": "skip", "grad_clip": zgraph.GradClip(norm=1.0, error_if_nonfinite=True)},
        {"on_nonfinite": "rollback", "offload": {"optimizer": "cpu", "delayed_after": 0}},
        {"on_nonfinite": "panic"},
    ],
    ids=str,
)
def test_plans_that_can_not_be_are_refused(plan):
    with pytest.raises(PlanError, match="on_nonfinite"):
        zgraph.Plan(**({"optimizer": zgraph.SGD()} | plan))


@pytest.mark.core
def test_a_skipped_step_is_logged(caplog):
    model = compiled(on_nonfinite="skip")
    with caplog.at_level(logging.WARNING, "zgraph.runtime.explain_nonfinite"):
        model.train_step(bad())
        model.zgraph.finish()
    assert "step 1 was skipped" in caplog.text


@pytest.mark.core
@sweep("zero", [0, 2, 3], quick=1)
def test_the_update_programs_on_virtual_ranks_are_right_after_every_pass(zero):
    from zgraph.inspection.bisect import bisect

    torch.manual_seed(0)
    plan = zgraph.Plan(backend="eager", zero=zero, on_nonfinite="skip", optimizer=zgraph.AdamW(), grad_clip=1.0)
    assert bisect(Net(Grows()).eval(), plan, 2, (good(),)).ok


# -- on real ranks ----------------------------------------------------------------------------------------------------
def one_ranks_rows(mode: str, plan: dict[str, Any], value: float, part: type[nn.Module], folder: str) -> Any:
    """One rank's rows are bad, in the second step: (what it raised, whether nothing has changed, what came after)."""
    model = compiled(part, on_nonfinite=mode, **plan)
    model.train_step(good())
    if folder:
        model.save_checkpoint(folder, "here")
    first = state(model)
    before = {
        n: t for n, t in first.items() if not (folder and n in dict(model.named_buffers()))
    }  # (a checkpoint has rank 0's)
    error = None
    try:
        model.train_step(bad(row=5, value=value) if dist.get_rank() == 1 else good())
    except StepError as raised:
        error = raised
    kept = same(before, {n: t for n, t in state(model).items() if n in before})
    loss = float(model.train_step(good(seed=1)))
    told = (
        (type(error).__name__, error.module, error.rank, error.micro_batch, error.where, error.phase) if error else None
    )
    return told, kept, int(model.zgraph.skipped_steps), math.isfinite(loss)


RANK_PLANS = [
    {"zero": 0},
    {"zero": 1, "micro_batches": 2},
    {"zero": 2, "grad_clip": 1.0},
    {"zero": 3, "micro_batches": 2},
    {"mesh": {"replicate": 2, "dp": 1}, "zero": 3},
]


@pytest.mark.gloo
@sweep("plan", RANK_PLANS, quick=(3,), ids=str)
def test_one_ranks_rows_skip_the_step_on_all(two, plan):
    assert two.run(one_ranks_rows, "skip", plan, 1e7, Grows, "") == [(None, True, 1, True)] * 2


@pytest.mark.gloo
@sweep("part, value, phase", [(Grows, 1e7, "forward"), (Root, 0.0, "backward")], quick=1)
@sweep("plan", RANK_PLANS, quick=(4,), ids=str)
def test_all_ranks_name_the_one_whose_rows_they_were(two, plan, part, value, phase):
    micro_batch = plan.get("micro_batches", 1) - 1
    told = ("NonFiniteError", "parts.1", 1, micro_batch, line(phase), phase)
    assert two.run(one_ranks_rows, "stop", plan, value, part, "") == [(told, True, 1, True)] * 2


@pytest.mark.gloo
def test_all_ranks_roll_back(two, tmp_path):
    told = ("RolledBackError", "parts.1", 1, 0, line("forward"), "forward")
    assert two.run(one_ranks_rows, "rollback", {}, 1e7, Grows, str(tmp_path)) == [(told, True, 0, True)] * 2


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.inductor
def test_compiled_ranks_stop_too(two):
    plan = {"backend": "inductor", "zero": 3}
    told = ("NonFiniteError", "parts.1", 1, 0, line("forward"), "forward")
    assert two.run(one_ranks_rows, "stop", plan, 1e7, Grows, "") == [(told, True, 1, True)] * 2

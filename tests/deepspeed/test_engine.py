"""The engine does what its calls say: accumulation, counters, checkpoints, optimizers and schedulers of the script's own, bad calls."""

import argparse
import copy
import dataclasses
import gc
import io
import logging
import weakref

import pytest
import torch
import torch.distributed as dist
from fake_world import fake_world
from sweeps import sweep
from torch import nn
from torch.distributed.tensor import DTensor

import zgraph.deepspeed as deepspeed
from zgraph.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from zgraph.deepspeed.ops.lamb import FusedLamb
from zgraph.deepspeed.ops.lion import FusedLion
from zgraph.deepspeed.runtime.lr_schedules import OneCycle, WarmupDecayLR, WarmupLR
from zgraph.deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint
from zgraph.errors import CheckpointError, ModelError, PlanError, StepError, UnsupportedError

pytestmark = pytest.mark.usefixtures("no_group_left")

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 2},
    "zgraph": {"backend": "eager"},
}


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def weights(model):
    """Whole parameters, plain tensors, by name."""
    found = {n: p.detach() for n, p in model.named_parameters()}
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).clone() for n, p in found.items()}


@pytest.mark.parametrize("groups", [False, True])
def test_parameters_from_before_do_not_stay_in_memory(groups: bool):
    model = net()
    before = [weakref.ref(param) for param in model.parameters()]
    with fake_world(2):
        given = [{"params": list(model[at].parameters()), "name": f"layer {at}"} for at in (0, 2)]
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=given if groups else model.parameters(), config=CONFIG
        )
        given.clear()
        gc.collect()
        assert all(ref() is None for ref in before)
        assert not groups or [group["name"] for group in engine.optimizer.param_groups] == ["layer 0", "layer 2"]
        engine.destroy()


def same(one, other):
    mine, theirs = weights(one), weights(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)


def loss_of(model, x):
    return nn.functional.mse_loss(model(x), x[:, :4].sin())


def rows(count, seed=5):
    data = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 8, generator=data) for _ in range(count)]


def plainly(model, optimizer, batches, parts, clip=1.0, scheduler=None):
    """What plain PyTorch does: the losses."""
    losses = []
    for number, x in enumerate(batches):
        loss = loss_of(model, x)
        (loss / parts).backward()
        losses.append(loss.item())
        if (number + 1) % parts == 0:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
    return losses


def trained(engine, batches):
    losses = []
    for x in batches:
        loss = loss_of(engine, x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def initialized(model=None, **options):
    options.setdefault("config", CONFIG)
    return deepspeed.initialize(model=net() if model is None else model, **options)


def changed(**values):
    return {**copy.deepcopy(CONFIG), **values}


# -- a loop -------------------------------------------------------------------------------------------------------------
def test_a_loop_is_that_of_plain_pytorch():
    engine, optimizer, loader, scheduler = initialized()
    plain = net()
    assert trained(engine, rows(6)) == plainly(
        plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0), rows(6), 2
    )
    assert loader is None and scheduler is None and optimizer.param_groups[0]["lr"] == 1e-2
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (3, 6, 12)
    assert engine.get_batch_info() == (4, 2, 2) and engine.train_batch_size() == 4
    assert engine.zero_optimization_stage() == 2 and not engine.fp16_enabled() and engine.gradient_clipping() == 1.0
    assert engine.get_global_grad_norm() > 0 and engine.was_step_applied()


def test_a_backward_of_the_scripts_own_is_divided_too():
    engine, *_ = initialized()
    other, *_ = initialized()
    for x in rows(4):
        engine.scale(loss_of(engine, x)).backward()
        engine.step()
    trained(other, rows(4))
    torch.testing.assert_close(weights(engine.module), weights(other.module))


def test_both_backwards_in_one_step_are_one_step():
    engine, *_ = initialized()
    first, second = rows(2)
    loss_of(engine, first).backward()
    engine.step()
    engine.backward(loss_of(engine, second))
    engine.step()
    other, *_ = initialized()
    trained(other, [first, second])
    torch.testing.assert_close(weights(engine.module), weights(other.module))


def test_gradients_of_the_scripts_own_backward_are_a_micro_batchs_share_at_once():
    engine, *_ = initialized()
    plain, (x, *_) = net(), rows(1)
    loss_of(engine, x).backward()
    (loss_of(plain, x) / 2).backward()
    for mine, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(deepspeed.utils.safe_get_full_grad(mine), theirs.grad)


@dataclasses.dataclass
class Named:
    """What a model may return: neither a tuple nor a dict."""

    first: torch.Tensor
    others: list


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x, named=False):
        first, second = self.one(x), self.other(x)
        return Named(first, [second]) if named else {"first": first, "others": [second, x]}


@pytest.mark.parametrize("named", [False, True])
def test_a_loss_of_several_outputs_is_divided_once(named):
    """Also where one engine's backward goes through another's outputs."""
    engine, *_ = initialized(Two())
    second, *_ = initialized(net())
    plain = net()
    (x,) = rows(1)
    out = engine(x, named=named)
    first, other = (out.first, out.others[0]) if named else (out["first"], out["others"][0])
    whole = (first * other).mean() + second(x).square().mean()
    engine.backward(whole)
    (plain(x).square().mean() / 2).backward()
    for mine, theirs in zip(second.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(deepspeed.utils.safe_get_full_grad(mine), theirs.grad)
    before = [deepspeed.utils.safe_get_full_grad(p) for p in engine.module.parameters()]
    engine.zero_grad()
    out = engine(x, named=named)
    first, other = (out.first, out.others[0]) if named else (out["first"], out["others"][0])
    (first * other).mean().backward()
    torch.testing.assert_close([deepspeed.utils.safe_get_full_grad(p) for p in engine.module.parameters()], before)


def test_0_and_1_are_false_and_true_where_a_key_is_either():
    engine, *_ = initialized(
        config=changed(zero_allow_untested_optimizer=1, zero_optimization={"stage": 1, "overlap_comm": 0})
    )
    assert engine.zero_allow_untested_optimizer() is True and engine.zero_overlap_comm() is False
    assert engine.zero_optimization_stage() == 1


def test_a_boundary_that_the_script_sets_is_the_end_of_a_step():
    engine, *_ = initialized(config=changed(gradient_accumulation_steps=1))
    plain = net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0)
    for x, last in zip(rows(3), (False, False, True), strict=True):
        engine.set_gradient_accumulation_boundary(last)
        engine.backward(loss_of(engine, x), scale_wrt_gas=False)
        engine.step()
        assert engine.was_step_applied() == last
    for x in rows(3):
        loss_of(plain, x).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizer.step()
    assert same(engine.module, plain)


def test_without_managed_accumulation_step_is_the_end():
    engine, *_ = initialized(config=changed(managed_gradient_accumulation=False))
    for x in rows(2):
        engine.backward(loss_of(engine, x))
    engine.step()
    other, *_ = initialized()
    trained(other, rows(2))
    assert engine.global_steps == 1
    assert engine.global_samples == 4  # two micro-batches of two rows
    assert same(engine.module, other.module)
    engine.backward(loss_of(engine, rows(1)[0]))
    engine.step()
    assert engine.global_samples == 6
    with pytest.raises(AssertionError, match=r"set_gradient_accumulation_boundary\(\) is not supported"):
        engine.set_gradient_accumulation_boundary(True)


def test_another_batch_size_is_another_number_of_micro_batches():
    engine, *_ = initialized()
    engine.set_train_batch_size(6)
    assert engine.gradient_accumulation_steps() == 3
    trained(engine, rows(3))
    assert engine.global_steps == 1
    with pytest.raises(ValueError, match="5 rows can't be divided"):
        engine.set_train_batch_size(5)


def test_a_configuration_that_is_given_twice_is_refused():
    with pytest.raises(PlanError, match="a configuration is given twice"):
        deepspeed.initialize(model=net(), config=CONFIG, config_params=CONFIG)


def test_train_batch_takes_micro_batches_and_gives_their_mean_loss():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()

        def forward(self, x):
            return loss_of(self.inner, x)

    engine, *_ = deepspeed.initialize(model=WithLoss(), config=CONFIG, training_data=[r[0] for r in rows(8)])
    mean = engine.train_batch(iter([(x,) for x in rows(2)]))
    plain = net()
    assert mean.item() == pytest.approx(sum(loss_of(plain, x).item() for x in rows(2)) / 2)
    assert engine.global_steps == 1 and engine.train_batch().dim() == 0 and engine.global_steps == 2
    assert engine.eval_batch(iter(rows(2))).item() > 0


# -- optimizers ---------------------------------------------------------------------------------------------------------
def test_an_optimizer_of_torchs_and_its_scheduler_are_the_engines():
    model, plain = net(), net()
    made = []
    for m in (model, plain):
        groups = [
            {"params": [p for p in m.parameters() if p.dim() > 1]},
            {"params": [p for p in m.parameters() if p.dim() < 2], "lr": 0.02},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        made.append((optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 0.5**n, lambda n: 0.9**n])))
    (mine, schedule), (theirs, plain_schedule) = made
    engine, optimizer, _, scheduler = initialized(model, optimizer=mine, lr_scheduler=schedule)
    assert trained(engine, rows(6)) == pytest.approx(
        plainly(plain, theirs, rows(6), 2, scheduler=plain_schedule), abs=1e-6
    )
    assert scheduler is schedule and engine.get_lr() == [g["lr"] for g in theirs.param_groups]
    assert [g["lr"] for g in mine.param_groups] == engine.get_lr() and mine.param_groups[0] is optimizer.param_groups[0]


def test_groups_with_equal_numbers_stay_apart_and_in_their_order():
    model = net()
    last, *others = reversed(list(model.parameters()))
    engine, optimizer, *_ = initialized(model, model_parameters=[{"params": [last]}, {"params": others}])
    assert [len(g["params"]) for g in optimizer.param_groups] == [1, 3]
    assert optimizer.param_groups[0]["names"] == ["2.bias"]
    optimizer.param_groups[0]["lr"] = 0.0
    before = weights(model)
    trained(engine, rows(2))
    assert [n for n, p in weights(model).items() if torch.equal(p, before[n])] == ["2.bias"]


def test_model_parameters_have_numbers_of_their_own():
    model = net()
    first, *others = model.parameters()
    _, optimizer, *_ = initialized(
        model, model_parameters=[{"params": [first], "lr": 0.5}, {"params": others, "weight_decay": 0.3}]
    )
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.5, 0.0), (1e-2, 0.3)]


def test_parameters_of_no_group_are_frozen_and_named(caplog):
    model = net()
    with caplog.at_level(logging.WARNING):
        engine, *_ = initialized(model, model_parameters=list(model[2].parameters()))
    assert "2 parameters are in no group (0.weight" in caplog.text
    before = weights(model)
    trained(engine, rows(2))
    assert [n for n, p in weights(model).items() if torch.equal(p, before[n])] == ["0.weight", "0.bias"]


@sweep(
    "kind, options",
    [
        (FusedAdam, {"lr": 1e-2, "adam_w_mode": False, "weight_decay": 0.1}),
        (DeepSpeedCPUAdam, {"lr": 1e-2, "weight_decay": 0.1}),
        (FusedLion, {"lr": 1e-3}),
        (FusedLamb, {"lr": 1e-2}),
    ],
    quick=2,
)
def test_deepspeeds_optimizers_are_the_plans(kind, options):
    model = net()
    engine, optimizer, *_ = initialized(model, optimizer=kind(model.parameters(), **options))
    trained(engine, rows(4))
    assert engine.global_steps == 2 and optimizer.param_groups[0]["lr"] == options["lr"]
    if kind is FusedAdam:
        plain = net()
        plainly(plain, torch.optim.Adam(plain.parameters(), lr=1e-2, weight_decay=0.1), rows(4), 2)
        torch.testing.assert_close(weights(model), weights(plain))


def test_an_optimizer_that_no_plan_has_steps_by_itself():
    model, plain = net(), net()
    engine, optimizer, *_ = initialized(model, optimizer=torch.optim.RAdam(model.parameters(), lr=1e-2))
    assert trained(engine, rows(6)) == pytest.approx(
        plainly(plain, torch.optim.RAdam(plain.parameters(), lr=1e-2), rows(6), 2), abs=1e-6
    )
    assert isinstance(optimizer, torch.optim.RAdam) and engine.get_global_grad_norm() > 0


def test_an_optimizer_that_has_stepped_is_refused():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    plainly(model, optimizer, rows(1), 1)
    with pytest.raises(StepError, match="has made steps already"):
        initialized(model, optimizer=optimizer)


def test_an_optimizer_that_has_states_before_its_first_step():
    model, plain = net(), net()
    options = {"lr": 1e-2, "initial_accumulator_value": 0.1}
    engine, *_ = initialized(model, optimizer=torch.optim.Adagrad(model.parameters(), **options))
    assert engine.optimizer.param_groups[0]["initial_accumulator_value"] == 0.1
    trained(engine, rows(4))
    plainly(plain, torch.optim.Adagrad(plain.parameters(), **options), rows(4), 2)
    torch.testing.assert_close(weights(model), weights(plain))
    stepped = torch.optim.Adagrad(plain.parameters())
    plainly(plain, stepped, rows(1), 1)
    with pytest.raises(StepError, match="has made steps already"):
        initialized(plain, optimizer=stepped)
    changed = torch.optim.Adagrad(plain.parameters())
    changed.state[plain[0].weight]["sum"].fill_(0.5)
    with pytest.raises(StepError, match="or its states were changed"):
        initialized(plain, optimizer=changed)


@pytest.mark.inductor
@pytest.mark.slow
def test_a_loop_runs_compiled_and_by_another_backend():
    engine, *_ = initialized(config=changed(zgraph={}))
    other, *_ = initialized()
    assert engine.handle.plan.backend == "inductor" and other.handle.plan.backend == "eager"
    other.compile(backend="eager")
    assert trained(engine, rows(4)) == pytest.approx(trained(other, rows(4)), abs=1e-6)
    engine.compile(backend="eager")
    assert trained(engine, rows(4, seed=8)) == pytest.approx(trained(other, rows(4, seed=8)), abs=1e-6)
    assert engine.global_steps == 4 and engine.handle.plan.backend == "eager"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_engine_without_an_optimizer_evaluates(precision):
    config = {k: v for k, v in CONFIG.items() if k != "optimizer"}
    engine, optimizer, *_ = initialized(config={**config, "bf16": {"enabled": precision == "bf16"}})
    assert optimizer is None and engine.get_lr() == []
    engine.eval()
    with torch.no_grad():
        shown = engine(rows(1)[0].to(torch.bfloat16 if precision == "bf16" else torch.float32))
    torch.testing.assert_close(shown.float(), net()(rows(1)[0]), rtol=0.05, atol=0.05)


def test_the_loss_scale_and_its_counts_are_told():
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
    engine, optimizer, *_ = initialized(config=changed(fp16=fp16, gradient_accumulation_steps=1))
    assert optimizer.loss_scale_config.cur_scale == optimizer.cur_scale == 256 and optimizer.dynamic_loss_scale
    for number, x in enumerate(rows(3)):
        engine.backward(loss_of(engine, x.half()).float() * (float("inf") if number == 1 else 1))
        engine.step()
    now = optimizer.loss_scale_config
    assert (now.cur_scale, now.cur_iter, now.last_overflow_iter, now.scale_window) == (128, 3, 1, 2)
    assert engine.skipped_steps == 1 and not optimizer.overflow and engine.global_steps == 3
    assert not hasattr(initialized()[1], "loss_scale_config")


class Both(nn.Module):
    """Returns its loss, and the logits that the loss is computed of, as transformers' models do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        logits = self.layer(x)
        return logits.square().mean(), logits


@pytest.mark.parametrize("own", [False, True])
def test_a_model_returns_its_loss_and_logits_and_both_are_kept(own):
    engine, *_ = initialized(Both())
    plain, x = Both(), rows(1)[0]
    for total_of in (lambda loss, logits: loss, lambda loss, logits: loss + logits.sin().sum()):
        output = engine(x)
        total = total_of(*output)
        total.backward() if own else engine.backward(total)
        plain.zero_grad()
        (total_of(*plain(x)) / 2).backward()
        for mine, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(deepspeed.utils.safe_get_full_grad(mine), theirs.grad)
        assert output[1].shape == (2, 4)
        engine.zero_grad()
    output = engine(x)
    output[1].retain_grad()
    with pytest.raises(UnsupportedError, match="keeps its gradient or has a hook"):
        engine.backward(output[0])


def test_functions_make_optimizer_and_scheduler():
    engine, optimizer, _, scheduler = initialized(
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.1),
        lr_scheduler=lambda o: WarmupLR(o, warmup_max_lr=0.2, warmup_num_steps=3),
    )
    trained(engine, rows(4))
    assert isinstance(scheduler, WarmupLR) and engine.get_lr() == scheduler.get_last_lr() == [
        pytest.approx(0.2 * 0.6309297535714574)
    ]
    assert optimizer.param_groups[0]["weight_decay"] == 1e-2


SCHEDULED = {
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 2, "total_num_steps": 9},
    }
}


@pytest.mark.parametrize("given", ["object", "function", "nothing"])
def test_the_scripts_scheduler_takes_precedence_over_the_configurations(given, caplog):
    model, plain = net(), net()
    mine, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))

    def half(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)

    scheduler = {"object": lambda: half(mine), "function": lambda: half, "nothing": lambda: None}[given]()
    with caplog.at_level(logging.WARNING):
        engine, _, _, returned = initialized(model, config=changed(**SCHEDULED), optimizer=mine, lr_scheduler=scheduler)
    assert engine.client_lr_scheduler is scheduler and returned is engine.lr_scheduler
    assert ("the configuration's scheduler is left out" in caplog.text) == (given != "nothing")
    plain_schedule = (
        WarmupDecayLR(theirs, 9, warmup_max_lr=0.5, warmup_num_steps=2) if given == "nothing" else half(theirs)
    )
    losses = plainly(plain, theirs, rows(6), 2, scheduler=plain_schedule)
    assert trained(engine, rows(6)) == pytest.approx(losses, abs=1e-6)
    assert engine.get_lr() == pytest.approx([g["lr"] for g in theirs.param_groups]) and type(returned) is type(
        plain_schedule
    )
    row = engine.report["scheduler.type"]
    assert row.verdict == ("applied" if given == "nothing" else "no effect here")
    assert engine.report["optimizer.type"].verdict == "no effect here"


def test_a_configurations_scheduler_that_is_left_out_may_be_wrong():
    wrong = {"type": "Cosine", "params": {"warmup_min_lr": "auto"}}
    with pytest.raises(PlanError, match="there is no schedule 'Cosine'"):
        initialized(config=changed(scheduler=wrong))
    engine, *_ = initialized(config=changed(scheduler=wrong), lr_scheduler=lambda o: WarmupLR(o))
    assert (
        engine.report["scheduler.params"].verdict == "no effect here"
        and engine.report["optimizer.type"].verdict == "applied"
    )


def test_a_scheduler_of_another_optimizer_is_refused():
    model = net()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(other, 2)
    for optimizer in (None, torch.optim.SGD(model.parameters(), lr=0.1), lambda params: other):
        with pytest.raises(AssertionError, match="StepLR of another optimizer than the engine's") as refused:
            initialized(model, optimizer=optimizer, lr_scheduler=schedule)
        assert isinstance(refused.value, ModelError) and not hasattr(model, "zgraph")
    with pytest.raises(ModelError, match="lr_scheduler is a int"):
        initialized(model, lr_scheduler=3)


def test_a_scheduler_without_an_optimizer_steps_nothing(caplog):
    config = {k: v for k, v in CONFIG.items() if k != "optimizer"}
    with caplog.at_level(logging.WARNING):
        engine, optimizer, _, scheduler = initialized(config=config, lr_scheduler=lambda o: WarmupLR(o))
    assert optimizer is None and scheduler is None and "there is no optimizer" in caplog.text
    assert engine.client_lr_scheduler is not None


# -- initialize again -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_that_is_initialized_again_goes_on_with_a_new_optimizer(precision):
    config = changed(bf16={"enabled": precision == "bf16"}, train_micro_batch_size_per_gpu=2)
    model = net()
    first, *_ = initialized(model, config=config)
    cast = torch.bfloat16 if precision == "bf16" else torch.float32
    trained(first, [x.to(cast) for x in rows(2)])
    kept = weights(model)
    again, *_ = initialized(first.module, config={**config, "gradient_accumulation_steps": 1})
    fresh = net()
    fresh.to(cast).load_state_dict(kept)
    other, *_ = initialized(fresh, config={**config, "gradient_accumulation_steps": 1})
    batches = [x.to(cast) for x in rows(3, seed=9)]
    assert trained(again, batches) == trained(other, batches) and again.global_steps == 3


# -- checkpoints ----------------------------------------------------------------------------------------------------------
def test_a_checkpoint_goes_on_with_counters_and_schedule(tmp_path):
    config = changed(scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 5}})
    engine, *_ = initialized(config=config)
    trained(engine, rows(4))
    assert engine.save_checkpoint(tmp_path, client_state={"epoch": 3}) is True
    assert (tmp_path / "global_step2").is_dir()
    wanted = trained(engine, rows(4, seed=8))
    other, *_ = initialized(net(4), config=config)
    path, client = other.load_checkpoint(tmp_path)
    assert client == {"epoch": 3} and path == str(tmp_path / "global_step2")
    assert (other.global_steps, other.micro_steps, other.global_samples) == (2, 4, 8)
    assert trained(other, rows(4, seed=8)) == wanted and other.get_lr() == engine.get_lr()


class Halving:
    """A scheduler that is no subclass of any: it has a step and a state of its own."""

    def __init__(self, optimizer):
        self.optimizer, self.halvings = optimizer, 0

    def step(self):
        self.halvings += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5

    def state_dict(self):
        return {"halvings": self.halvings}

    def load_state_dict(self, state):
        self.halvings = state["halvings"]


def test_a_scheduler_goes_on_from_what_its_own_kind_saved(tmp_path, caplog):
    def on(kind):
        return {
            Halving: Halving,
            WarmupLR: lambda o: WarmupLR(o, warmup_num_steps=9),
            torch.optim.lr_scheduler.LambdaLR: lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.5**n),
        }[kind]

    kinds = {Halving: "halvings", WarmupLR: "last_batch_iteration", torch.optim.lr_scheduler.LambdaLR: "last_epoch"}
    for saving in kinds:
        engine, *_ = initialized(lr_scheduler=on(saving))
        trained(engine, rows(4))
        engine.save_checkpoint(tmp_path / saving.__name__)
        for loading, position in kinds.items():
            again, *_ = initialized(lr_scheduler=on(loading))
            begins = getattr(again.lr_scheduler, position)
            caplog.clear()
            if loading is Halving and saving is not Halving:
                continue  # (what its state has is its own business)
            again.load_checkpoint(tmp_path / saving.__name__)
            now = getattr(again.lr_scheduler, position)
            assert now == (getattr(engine.lr_scheduler, position) if loading is saving else begins)
            assert (f"says nothing of a {loading.__name__}: it begins anew" in caplog.text) == (loading is not saving)


def test_a_folder_without_checkpoints_gives_none(tmp_path, caplog):
    engine, *_ = initialized()
    with caplog.at_level(logging.WARNING):
        assert engine.load_checkpoint(tmp_path) == (None, None)
    assert "no file latest" in caplog.text
    with pytest.raises(CheckpointError, match="there is no checkpoint 'best'"):
        engine.load_checkpoint(tmp_path, tag="best")


def test_weights_alone_leave_the_counters(tmp_path):
    engine, *_ = initialized()
    trained(engine, rows(2))
    engine.save_checkpoint(tmp_path, tag="a")
    other, *_ = initialized(net(4))
    other.load_checkpoint(tmp_path, load_module_only=True)
    assert other.global_steps == 0
    assert same(other.module, engine.module)


@pytest.mark.parametrize("alone", [{"load_optimizer_states": False}, {"load_module_only": True}])
def test_states_that_are_not_loaded_stay_as_they_are(tmp_path, alone):
    engine, *_ = initialized()
    trained(engine, rows(2))
    engine.save_checkpoint(tmp_path, tag="a")
    saved = weights(engine.module)
    trained(engine, rows(4, seed=3))
    weight = engine.module[0].weight
    before = [deepspeed.utils.safe_get_full_optimizer_state(weight, name) for name in ("exp_avg", "exp_avg_sq")]
    engine.load_checkpoint(tmp_path, tag="a", **alone)
    after = [deepspeed.utils.safe_get_full_optimizer_state(weight, name) for name in ("exp_avg", "exp_avg_sq")]
    assert all(torch.equal(a, b) and a.any() for a, b in zip(before, after, strict=True))
    assert all(torch.equal(value, saved[name]) for name, value in weights(engine.module).items())
    assert engine.global_steps == (3 if "load_module_only" in alone else 1)


def test_a_checkpoint_may_be_loaded_in_part(tmp_path):
    config = changed(scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 5}})
    engine, *_ = initialized(config=config)
    trained(engine, rows(4))
    engine.save_checkpoint(tmp_path, tag="a")
    rates = engine.get_lr()
    wanted = trained(engine, rows(4, seed=8))

    def loaded(**options):
        other, *_ = initialized(net(4), config=config)
        other.load_checkpoint(tmp_path, tag="a", **options)
        return other

    without_schedule = loaded(load_lr_scheduler_states=False)
    assert without_schedule.lr_scheduler.last_batch_iteration == -1 and without_schedule.global_steps == 2
    assert loaded().lr_scheduler.last_batch_iteration == 1 and trained(loaded(), rows(4, seed=8)) == wanted
    without_states = loaded(load_optimizer_states=False)
    assert without_states.get_lr() == loaded().get_lr() == rates  # (those of the schedule)
    assert loaded(load_module_only=True).get_lr() == initialized(net(4), config=config)[0].get_lr() != rates
    assert without_states.global_steps == 2 and without_states.lr_scheduler.last_batch_iteration == 1
    own = trained(without_states, rows(4, seed=8))
    assert own[:2] == wanted[:2] and own[2:] != wanted[2:]  # (the first update is that of other states)
    other, *_ = initialized(nn.Linear(8, 4), config=config)
    with pytest.raises(CheckpointError):
        other.load_checkpoint(tmp_path, tag="a")


def test_what_nobody_can_ask_of_a_checkpoint_is_refused_by_name(tmp_path):
    engine, *_ = initialized()
    with pytest.raises(UnsupportedError, match="save_latest=False"):
        engine.save_checkpoint(tmp_path, save_latest=False)
    with pytest.raises(ValueError, match="needs a folder"):
        engine.save_checkpoint("")
    assert not list(tmp_path.iterdir())


def test_a_rate_that_is_set_is_that_of_the_next_update_until_a_schedule_moves_it():
    engine, *_ = initialized()
    plain = net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05, weight_decay=0)
    engine.set_lr(0.05)
    assert engine.get_lr() == [0.05] and trained(engine, rows(4)) == plainly(plain, optimizer, rows(4), 2)
    scheduled, *_ = initialized(
        config=changed(scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 5}})
    )
    scheduled.set_lr(0.05)
    assert scheduled.get_lr() == [0.05]
    trained(scheduled, rows(2))
    assert scheduled.get_lr() == scheduled.lr_scheduler.get_last_lr() != [0.05]


def test_whole_weights_in_one_file(tmp_path):
    engine, *_ = initialized(config=changed(bf16={"enabled": True}))
    assert engine.save_16bit_model(tmp_path, "weights.bin")
    state = torch.load(tmp_path / "weights.bin")
    assert {n: t.dtype for n, t in state.items()} == dict.fromkeys(net().state_dict(), torch.bfloat16)


def test_state_dicts_go_round():
    engine, *_ = initialized()
    other, *_ = initialized(net(4))
    buffer = io.BytesIO()
    torch.save(engine.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer))
    assert same(other.module, engine.module)
    assert set(engine.module_state_dict()) == set(net().state_dict())


def test_a_modules_state_dict_takes_deepspeeds_arguments():
    model, other = net(), net(1)
    model[0].requires_grad_(False)
    engine, second = initialized(model)[0], initialized(other)[0]
    into = {}
    assert engine.module_state_dict(into, "net.", exclude_frozen_parameters=True) is into
    assert set(into) == {"net.2.weight", "net.2.bias"}
    assert next(iter(engine.module_state_dict(keep_vars=True).values())) is next(engine.module.parameters())
    whole = weights(engine.module)
    part = {n: v for n, v in whole.items() if n != "0.bias"}
    before = weights(second.module)
    for given, said in (
        (part, r"may be: \['0.bias'\]"),
        ({**whole, "x": whole["0.bias"]}, r"not the model's: \['x'\]"),
    ):
        with pytest.raises(CheckpointError, match=said):
            second.load_module_state_dict({"module": given}, allowed_missing_keys=["2.bias"])
    assert all(torch.equal(before[n], v) for n, v in weights(second.module).items())
    second.load_module_state_dict({"module": part}, allowed_missing_keys=["0.bias"])
    assert torch.equal(weights(second.module)["0.weight"], whole["0.weight"])
    assert torch.equal(weights(second.module)["0.bias"], before["0.bias"])


@pytest.mark.parametrize("stage", [1, 3])
def test_a_function_of_the_scripts_own_loads_whole_weights(stage):
    engine, *_ = initialized(net(1), config=changed(zero_optimization={"stage": stage}))
    trained(engine, rows(2))

    def load(src, dst):
        for name, param in dst.named_parameters():
            param.data.copy_(src[name])

    engine.load_module_state_dict({"module": weights(net())}, custom_load_fn=load)
    assert same(engine.module, net())
    plain = net()
    trained(engine, rows(2))  # (the masters, if there are some, are those weights)
    assert not same(engine.module, plain)


def test_options_of_compile_are_the_plans_and_are_reported(caplog):
    engine, *_ = initialized()
    with caplog.at_level(logging.WARNING):
        engine.compile(
            "eager", {"dynamic": True, "mode": "max-autotune", "fullgraph": True, "options": None, "backend": "x"}
        )
    assert engine.handle.plan.shapes == "dynamic" and engine.handle.plan.backend == "eager"
    found = {row.key: row.verdict for row in engine.report.rows if row.key.startswith("engine.compile")}
    assert found == {
        "engine.compile(backend)": "applied",
        "engine.compile(dynamic)": "applied",
        "engine.compile(mode)": "no effect here",
        "engine.compile(fullgraph)": "equivalent",
    }
    assert "engine.compile(mode='max-autotune') has no effect here" in caplog.text and "takes precedence" in caplog.text
    engine.compile(
        "eager",
        {"dynamic": False, "mode": "default", "disable": False},
        schedule=[(0, [])],
        compiled_autograd_enabled=True,
    )
    assert engine.handle.plan.shapes == "static" and "engine.compile(mode)" not in str(engine.report)
    assert engine.report["engine.compile(schedule)"].verdict == "no effect here"
    for given, said in (
        ({"backend": "aot_eager"}, "backend='aot_eager'"),
        ({"backend": lambda graph, inputs: graph}, "backend=<function"),
        ({"compile_kwargs": {"options": {"max_autotune": True}}}, "options="),
        ({"compile_kwargs": {"disable": True}}, "disable=True"),
        ({"compile_kwargs": {"fulgraph": True}}, "no option 'fulgraph'"),
    ):
        with pytest.raises(UnsupportedError, match=said):
            engine.compile(**given)
    assert trained(engine, rows(2)) == trained(initialized()[0], rows(2))


class Counting:
    """A scheduler as Megatron has it: it is told by how many rows to go on."""

    def __init__(self, optimizer):
        self.optimizer, self.rows = optimizer, 0

    def step(self, increment):
        self.rows += increment
        self.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + self.rows)


def test_a_scheduler_that_counts_rows_gets_those_of_a_step():
    engine, _, _, scheduler = initialized(lr_scheduler=Counting)
    trained(engine, rows(4))
    assert scheduler.rows == 2 * engine.train_batch_size() == 8 and engine.get_lr() == [1e-2 / 9]
    engine.set_train_batch_size(2)
    trained(engine, rows(1))
    assert scheduler.rows == 10
    engine.backward(loss_of(engine, rows(1)[0]))
    engine.step({"increment": 5})
    assert scheduler.rows == 15


def test_a_scheduler_that_takes_what_no_engine_gives_is_refused_before_the_update():
    class Wants:
        def step(self, one, other):
            pass

    for options, kwargs, said in (
        ({"lr_scheduler": lambda optimizer: Wants()}, None, "Wants.step does not take one number alone"),
        ({"lr_scheduler": Counting}, {"incremnt": 2}, "Counting.step does not take the arguments incremnt"),
    ):
        engine, *_ = initialized(config=changed(gradient_accumulation_steps=1), **options)
        before = weights(engine.module)
        engine.backward(loss_of(engine, rows(1)[0]))
        with pytest.raises(StepError, match=said):
            engine.step(kwargs)
        assert all(torch.equal(before[n], v) for n, v in weights(engine.module).items()) and engine.global_steps == 0


def test_a_loader_has_deepspeeds_arguments():
    engine, *_ = initialized()
    data = [torch.full((8,), float(at)) for at in range(4)]
    loader = engine.deepspeed_io(data, 2, "eval", False, num_local_io_workers=1)
    assert engine.client_optimizer is None and engine.postscale_gradients() and not engine.elasticity_enabled()
    assert [batch[:, 0].tolist() for batch in loader] == [[0, 1], [2, 3]] and loader._loader.num_workers == 1
    with pytest.raises(TypeError, match="num_workers"):
        engine.deepspeed_io(data, num_workers=1)
    changed_rows, _, mine, _ = initialized(training_data=data, optimizer=lambda p: torch.optim.SGD(p, 0.1))
    changed_rows.set_data_post_process_func(lambda batch, told: batch + 1)
    assert next(iter(mine)).min() >= 1 and isinstance(changed_rows.client_optimizer, torch.optim.SGD)


def test_arguments_have_the_local_rank(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    args = argparse.Namespace(local_rank=-1, deepspeed_config=None)
    initialized(args=args)
    assert args.local_rank == 0


# -- bad calls --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "section, dtype",
    [
        ({}, torch.float32),
        ({"bf16": {"enabled": True}}, torch.bfloat16),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, torch.float32),
    ],
)
def test_an_engine_says_in_which_dtype_it_reduces(section, dtype):
    engine, *_ = deepspeed.initialize(model=net(), config={**CONFIG, **section})
    assert engine.communication_data_type is dtype


def test_what_is_the_models_is_the_engines():
    model = net()
    model.remark = "here"
    engine, *_ = initialized(model)
    assert engine.remark == "here"
    with pytest.raises(AttributeError, match="'DeepSpeedEngine' object has no attribute 'nothing'"):
        engine.nothing  # noqa: B018


@pytest.mark.parametrize(
    "options, error, said",
    [
        ({"config": None}, PlanError, "needs a configuration"),
        ({"config": {"optimizer": {"type": "AdamW"}}}, PlanError, "how many rows"),
        ({"mesh_param": (1, 2)}, UnsupportedError, "mesh_param"),
        ({"optimizer": 3}, ModelError, "no optimizer"),
        ({"optimizer": lambda params: 3}, ModelError, "has made a int"),
        ({"model_parameters": [nn.Parameter(torch.ones(2))]}, ModelError, "not the model's"),
        ({"training_data": 3}, ModelError, "no data set"),
        (
            {"config": {**CONFIG, "fp16": {"enabled": True}}, "optimizer": lambda p: torch.optim.RAdam(p)},
            PlanError,
            "fp16 is enabled, and RAdam is no optimizer that a plan has",
        ),
        ({"config": {**CONFIG, "zgraph": {"backends": "eager"}}}, PlanError, "backends"),
        (
            {
                "config": {**CONFIG, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
                "optimizer": lambda p: torch.optim.RAdam(p),
            },
            PlanError,
            "the script's own RAdam can't be offloaded",
        ),
        ({"config": {**CONFIG, "zero_optimization": {"stage": 2, "overlap_comm": 2}}}, PlanError, "true or false"),
    ],
)
def test_bad_calls_are_refused(options, error, said):
    with pytest.raises(error, match=said):
        initialized(**options)


def test_steps_out_of_order_are_refused():
    engine, *_ = initialized(config=changed(gradient_accumulation_steps=1))
    with pytest.raises(StepError, match="called before backward"):
        engine.step()
    with pytest.raises(AssertionError, match=r"step\(\) inside no_sync"), engine.no_sync():
        engine.step()
    with pytest.raises(AssertionError, match="reentry"), engine.no_sync(), engine.no_sync():
        pass
    for call in (engine.backward, engine.scale):
        with pytest.raises(AssertionError, match="no scalar tensor"):
            call(engine(rows(1)[0]))
    with pytest.raises(AssertionError, match="cannot be nested"), engine.no_sync(), engine.coalesce_grad_reduction():
        pass
    with pytest.raises(StepError, match="depends on no parameter"), torch.no_grad():
        engine.backward(loss_of(engine, rows(1)[0]))
    without, *_ = initialized(config={k: v for k, v in CONFIG.items() if k != "optimizer"})
    with pytest.raises(StepError, match="needs an optimizer, and the engine has none"):
        without.backward(loss_of(without, rows(1)[0]))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_checkpoint_within_a_step_leaves_its_gradients_out_and_says_so(tmp_path, caplog, stage):
    engine, *_ = initialized(config=changed(zero_optimization={"stage": stage}))
    trained(engine, rows(3))
    with caplog.at_level(logging.WARNING):
        engine.save_checkpoint(tmp_path)
    assert "within a step" in caplog.text
    trained(engine, rows(1, seed=9))  # (the gradients still waited: this is the end of a step)
    other, *_ = initialized(net(1), config=changed(zero_optimization={"stage": stage}))
    other.load_checkpoint(tmp_path)
    assert (other.global_steps, other.micro_steps) == (1, 2)
    trained(other, [rows(3)[2], rows(1, seed=9)[0]])
    torch.testing.assert_close(weights(other.module), weights(engine.module))


def test_states_of_an_optimizer_that_no_plan_has_go_into_checkpoints(tmp_path):
    def made(seed, kind=torch.optim.RMSprop):
        model = net(seed)
        return initialized(model, optimizer=kind(model.parameters(), lr=1e-2))[0]

    engine, other = made(0), made(1)
    trained(engine, rows(4))
    engine.save_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path)
    assert trained(other, rows(4, seed=8)) == trained(engine, rows(4, seed=8))
    assert same(other.module, engine.module)
    third = made(2, torch.optim.RAdam)
    with pytest.raises(CheckpointError, match="states of RMSprop on 1 rank"):
        third.load_checkpoint(tmp_path)
    assert third.load_checkpoint(tmp_path, load_optimizer_states=False)[0] is not None
    engine.module.zgraph.save_checkpoint(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="no states of RMSprop"):
        other.load_checkpoint(tmp_path / "plain")


def test_frozen_weights_stay_out_of_a_checkpoint_where_that_is_asked_for(tmp_path):
    def made(seed):
        model = net(seed)
        model[0].requires_grad_(False)
        return initialized(model)[0]

    engine, other = made(0), made(1)
    trained(engine, rows(2))
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    kept = weights(other.module)["0.weight"]
    other.load_checkpoint(tmp_path)
    assert torch.equal(weights(other.module)["0.weight"], kept)
    torch.testing.assert_close(weights(other.module)["2.weight"], weights(engine.module)["2.weight"])


def test_whole_fp32_weights_of_a_checkpoint_are_loaded_into_the_model_that_saved_it(tmp_path):
    engine, *_ = initialized()
    trained(engine, rows(2))
    engine.save_checkpoint(tmp_path)
    saved = weights(engine.module)
    trained(engine, rows(2))
    assert load_state_dict_from_zero_checkpoint(engine.module, tmp_path) is engine.module
    assert all(torch.equal(value, saved[name]) for name, value in weights(engine.module).items())


# -- on ranks -----------------------------------------------------------------------------------------------------------
def on_ranks(order):
    """Stages one after another on the same model: the losses of each, and of plain PyTorch with a new optimizer each time."""
    rank, found, plain = dist.get_rank(), [], net()
    model = net()
    for stage, parts in order:
        config = changed(gradient_accumulation_steps=parts, zero_optimization={"stage": stage})
        engine, *_ = initialized(model, config=config)
        mine = [rows(parts, seed=20 * len(found) + r) for r in range(2)]
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0)
        trained(engine, mine[rank])
        for part in range(parts):
            ((loss_of(plain, mine[0][part]) + loss_of(plain, mine[1][part])) / 2 / parts).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert engine.get_global_grad_norm() == pytest.approx(float(norm), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
        mine, theirs = weights(model), weights(plain)
        found.append(max(float((mine[n] - theirs[n]).abs().max()) for n in theirs))
    return found


@pytest.mark.slow
def test_stages_one_after_another_are_plain_pytorchs_steps(two):
    for found in two.run(on_ranks, [(2, 1), (3, 2), (0, 1), (3, 1), (1, 2)]):
        assert max(found) < 2e-6


def summed(stage):
    """Weights after two steps whose gradients are summed over the ranks, by the engine's backward and by the script's own, and of plain PyTorch."""
    found = []
    for own in (False, True):
        engine, *_ = initialized(config=changed(gradient_allreduce_op="sum", zero_optimization={"stage": stage}))
        for number in range(4):
            loss = loss_of(engine, rows(1, seed=2 * number + dist.get_rank())[0])
            loss.backward() if own else engine.backward(loss)
            engine.step()
        assert engine.report["gradient_allreduce_op"].verdict == "applied"
        found.append(weights(engine.module))
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_are_summed_over_ranks_where_that_is_asked_for(two, stage):
    plain = net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0)
    for step in range(2):
        for number in (2 * step, 2 * step + 1):
            (sum(loss_of(plain, rows(1, seed=2 * number + rank)[0]) for rank in range(2)) / 2).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for both in two.run(summed, stage):
        for found in both:
            for name, value in weights(plain).items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6)


class Losses(nn.Module):
    """A loss for each of its inputs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, inputs):
        return tuple(self.linear(x).square().mean() for x in inputs)


def test_several_losses_of_inputs_that_want_gradients_are_summed_outside():
    torch.manual_seed(0)
    plain = Losses()
    engine, *_ = deepspeed.initialize(model=copy.deepcopy(plain), config=CONFIG | {"gradient_accumulation_steps": 1})
    for wanted in (sum, lambda losses: losses[1], sum):
        given = [x.requires_grad_() for x in rows(2)]
        mine = [x.detach().clone().requires_grad_() for x in given]
        wanted(plain(given)).backward()
        engine.backward(wanted(engine(mine)))
        for x, y in zip(given, mine, strict=True):
            assert (x.grad is None or not x.grad.any()) == (y.grad is None or not y.grad.any())
            assert y.grad is None or torch.equal(x.grad, y.grad)
        assert torch.equal(plain.linear.weight.grad, engine.module.linear.weight.grad.full_tensor())
        plain.zero_grad()
        engine.zero_grad()


def test_gradients_of_a_script_s_own_move_the_loss_scale_of_stage_0():
    """(Its own rule: each overflow halves the scale, whatever hysteresis says, and none ends the run.)"""
    fp16 = {"enabled": True, "initial_scale_power": 3, "loss_scale_window": 2, "hysteresis": 3}
    config = CONFIG | {"fp16": fp16, "zero_optimization": {"stage": 0}, "gradient_accumulation_steps": 1}
    engine, optimizer, *_ = deepspeed.initialize(model=net(), config=config)
    seen = []
    for value in (float("inf"), float("nan"), 0.5, 0.5, 0.5, *[float("inf")] * 4):
        for param in engine.module.parameters():
            param.grad = torch.full_like(param, value)
        engine.step()
        seen.append(optimizer.loss_scale_config.cur_scale)
    assert seen == [4.0, 2.0, 2.0, 2.0, 4.0, 2.0, 1.0, 1.0, 1.0]
    assert engine.skipped_steps == 6
    assert optimizer.needs_scaler()


def test_groups_keep_their_labels():
    model = net()
    groups = [{"params": list(model.parameters()), "name": "all", "lr": 0.5, "kind": "dense"}]
    _, optimizer, *_ = initialized(model, model_parameters=groups)
    assert (optimizer.param_groups[0]["name"], optimizer.param_groups[0]["kind"]) == ("all", "dense")
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_schedule_writes_into_a_rate_that_is_a_tensor():
    optimizer = torch.optim.AdamW(net().parameters(), lr=torch.tensor(0.1))
    rate = optimizer.param_groups[0]["lr"]
    schedule = WarmupLR(optimizer, warmup_max_lr=0.5, warmup_num_steps=4, warmup_type="linear")
    seen = [rate.item()]
    for _ in range(4):
        schedule.step()
        seen.append(rate.item())
    assert optimizer.param_groups[0]["lr"] is rate
    assert seen == pytest.approx([0.0, 0.0, 0.125, 0.25, 0.375])


def test_one_cycle_says_the_betas_it_sets():
    optimizer = torch.optim.AdamW(net().parameters(), lr=0.1)
    schedule = OneCycle(optimizer, cycle_min_lr=0.01, cycle_max_lr=0.1, cycle_first_step_size=4)
    assert schedule.get_mom() == [(0.9, 0.99)]  # (and the first update has 0.8, as DeepSpeed's)
    for _ in range(6):
        schedule.step()
        assert schedule.get_mom() == [optimizer.param_groups[0]["betas"]]
    still = OneCycle(optimizer, cycle_min_lr=0.01, cycle_max_lr=0.1, cycle_momentum=False)
    assert still.get_mom() is None


@pytest.mark.parametrize("again", ["load", "compile"])
def test_an_update_of_zeros_leaves_what_was_loaded_before_the_first_step(tmp_path, again):
    """(Most low weights of a checkpoint round to those of the beginning, and are none of it.)"""
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 4.0}}
    config = changed(bf16={"enabled": True}, zero_optimization={"stage": 0}, optimizer=optimizer)

    def train(engine, steps):
        for step in range(steps):
            rows = torch.randn(2, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
            engine.backward(1e-3 * engine(rows).float().square().mean())
            engine.step()
        return [p.full_tensor().clone() for p in engine.module.parameters()]

    engine, *_ = initialized(config=config)
    begun = [p.full_tensor().clone() for p in engine.module.parameters()]
    wanted = train(engine, 2)
    assert not all(torch.equal(a, b) for a, b in zip(begun, wanted, strict=True))
    engine.save_checkpoint(tmp_path)
    other, *_ = initialized(config=config)
    if again == "load":
        other.load_checkpoint(tmp_path)
        assert all(torch.equal(p.full_tensor(), w) for p, w in zip(other.module.parameters(), wanted, strict=True))
        wanted = train(engine, 2)
    else:
        other.compile(backend="eager", compile_kwargs={"dynamic": True})
    assert all(torch.equal(a, b) for a, b in zip(train(other, 2), wanted, strict=True))

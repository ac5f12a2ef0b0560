"""DeepSpeed and zgraph's front door, side by side on two ranks: losses, norms, loss scales, learning rates and skipped steps of 10 steps."""

import contextlib
import importlib
import importlib.util

import deepspeed_scripts
import pytest
import torch
from sweeps import chosen, sweep
from torch import nn

STEPS = 10
ADAM = {"type": "AdamW", "params": {"lr": 5e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}}
SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
SCHEDULES = {
    "none": None,
    "warmup": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
    "decay": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 8, "warmup_max_lr": 5e-3, "warmup_num_steps": 3, "warmup_type": "linear"},
    },
    "cosine": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "warmup_num_steps": 3}},
    "cycle": {
        "type": "OneCycle",
        "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 4, "decay_step_size": 2},
    },
    "range": {
        "type": "LRRangeTest",
        "params": {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0},
    },
}
HALF = {"enabled": True, "initial_scale_power": 12}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(24, 16)
        self.norm = nn.LayerNorm(16)
        self.inner = nn.Linear(16, 33)
        self.outer = nn.Linear(33, 16, bias=False)
        self.head = nn.Linear(16, 24)

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(x + self.outer(nn.functional.gelu(self.inner(self.norm(x)))))


def _scale_of(optimizer):
    """(DeepSpeed has it elsewhere at stage 0.)"""
    scaling = getattr(optimizer, "loss_scale_config", None)
    return float(scaling.cur_scale if scaling is not None else getattr(optimizer, "cur_scale", 1.0))


def _unscaled(config):
    """Whether DeepSpeed (0.19.8) does not scale the loss: `engine.backward` asks ZeRO's optimizers alone to, and that of stage 0 divides gradients by
    the scale all the same. (Its norm is that of the scaled ones.)"""
    return "fp16" in config and not config["zero_optimization"]["stage"]


def curves(system, config, blown=()):
    """What an engine says at each of `STEPS` steps; at micro-batches of steps in `blown` the loss is infinite."""
    real = system == "deepspeed"
    unscaled = real and _unscaled(config)
    module = deepspeed_scripts.ready() if real else importlib.import_module("zgraph.deepspeed")
    config = deepspeed_scripts.of_torch(config) if real else deepspeed_scripts.eager(config)
    torch.manual_seed(3)
    model = Net()
    engine, optimizer, _, _ = module.initialize(model=model, model_parameters=model.parameters(), config=config)
    found = {"loss": [], "norm": [], "scale": [], "rate": [], "skipped": [], "applied": []}
    data = torch.Generator().manual_seed(7 + engine.global_rank)
    for step in range(STEPS):
        for _ in range(engine.gradient_accumulation_steps()):
            ids = torch.randint(24, (2, 6), generator=data)
            loss = nn.functional.cross_entropy(engine(ids).float().flatten(0, 1), ids.roll(-1, 1).flatten())
            found["loss"].append(loss.item())
            scale = _scale_of(optimizer) if unscaled else 1.0
            engine.backward(loss * (float("inf") if step in blown else scale))
            engine.step()
        norm = engine.get_global_grad_norm()
        found["norm"].append(None if norm is None else float(norm) / scale)
        found["scale"].append(_scale_of(optimizer))
        found["rate"] += engine.get_lr()
        found["skipped"].append(engine.skipped_steps)
        found["applied"].append(engine.was_step_applied())
    assert engine.global_steps == STEPS
    return found


def curves_with_torchs_linear(system, config, blown=()):
    """The same, where linear layers round as torch's do by either system. (DeepSpeed's stage 3 replaces them for the process.)"""
    with deepspeed_scripts.torchs_linear() if system == "deepspeed" else contextlib.nullcontext():
        return curves(system, config, blown)


def hold(mine, theirs, low, blown=()):
    for rank in range(2):
        one, other = mine[rank], theirs[rank]
        assert one["loss"] == pytest.approx(other["loss"], abs=5e-3 if low else 1e-5)
        for step, (norm, theirs_norm) in enumerate(zip(one["norm"], other["norm"], strict=True)):
            if (
                theirs_norm is not None and step not in blown
            ):  # (without ZeRO DeepSpeed says none; of a skipped step not the norm)
                assert norm == pytest.approx(theirs_norm, rel=2e-2 if low else 1e-5)
        assert one["rate"] == pytest.approx(other["rate"], rel=1e-9, abs=1e-12)
        assert (one["scale"], one["skipped"], one["applied"]) == (other["scale"], other["skipped"], other["applied"])


def configuration(stage, parts, clip, precision, schedule, optimizer, **others):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": parts,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": optimizer,
        "zero_allow_untested_optimizer": True,
        **others,
    }
    if clip is not None:
        config["gradient_clipping"] = clip
    if SCHEDULES[schedule] is not None:
        config["scheduler"] = SCHEDULES[schedule]
    if precision != "fp32":
        config.setdefault(precision, HALF if precision == "fp16" else {"enabled": True})
    return config


QUICK = {
    "stage 3, accumulation, warm-up": configuration(3, 2, 0.5, "fp32", "warmup", ADAM),
    "stage 0, SGD, default clipping": configuration(0, 1, None, "fp32", "cosine", SGD),
    "stage 2, bf16, decay": configuration(2, 2, 1.0, "bf16", "decay", ADAM),
    "stage 1, fp16, one cycle": configuration(1, 1, 0.0, "fp16", "cycle", ADAM),
}


@sweep("name", QUICK, quick=(0,))
def test_a_configuration_gives_deepspeeds_numbers(two, deepspeeds, name):
    config = QUICK[name]
    low = "bf16" in config or "fp16" in config
    hold(two.run(curves, "zgraph", config), deepspeeds.run(curves, "deepspeed", config), low)


@sweep("precision, stage", [("fp16", 2), ("bf16", 1)], quick={0})
def test_overflows_are_skipped_as_deepspeed_skips_them(two, deepspeeds, precision, stage):
    blown = (2, 3, 4, 7)
    config = configuration(stage, 2, 1.0, precision, "warmup", ADAM)
    mine, theirs = two.run(curves, "zgraph", config, blown), deepspeeds.run(curves, "deepspeed", config, blown)
    assert theirs[0]["skipped"][-1] == len(blown)
    hold(mine, theirs, True, blown)


@sweep("stage", [0, 2], quick=1)
def test_the_loss_scale_grows_and_shrinks_at_deepspeeds_steps(two, deepspeeds, stage):
    """(DeepSpeed divides the gradients of a step at which the scale doubles by the doubled one: losses part by that.)"""
    config = configuration(stage, 1, 0.0, "fp16", "none", ADAM)
    config["fp16"] = HALF | {"loss_scale_window": 1, "hysteresis": 2}
    mine, theirs = (
        ranks.run(curves, system, config, (4, 5, 9)) for ranks, system in ((two, "zgraph"), (deepspeeds, "deepspeed"))
    )
    assert mine[0]["scale"] == theirs[0]["scale"] and len(set(mine[0]["scale"])) > 3
    assert mine[0]["skipped"] == theirs[0]["skipped"]


L2 = {"type": "Adam", "params": {"lr": 5e-3, "adam_w_mode": False, "weight_decay": 0.3}}
DECAYED = [
    ("bf16", L2, ()),
    ("bf16", L2, (0, 1, 5)),
    ("fp16", L2, (0,)),
    ("fp16", {"type": "AdamW", "params": {"lr": 5e-3, "weight_decay": 0.3}}, (0, 1, 4)),
    ("fp16", {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.2}}, ()),
]


@sweep("precision, optimizer, blown", DECAYED, quick={0})
def test_stage_0_decays_once_before_the_first_step_that_is_not_skipped(two, deepspeeds, precision, optimizer, blown):
    """(Within 1e-5, so that a decay that comes a forward too early is seen.)"""
    config = configuration(0, 2, 1.0, precision, "warmup", optimizer)
    mine, theirs = (
        ranks.run(curves_with_torchs_linear, system, config, blown)
        for ranks, system in ((two, "zgraph"), (deepspeeds, "deepspeed"))
    )
    hold(mine, theirs, False, blown)


SWEEP = [
    *chosen((0, 1, 2, 3), (1, 3), (0.0, 0.3), ("fp32",), ("none",), (ADAM, SGD)),
    *chosen((0, 1, 2, 3), (2,), (None,), ("fp32",), ("warmup", "range"), (ADAM,), together=1),
    *chosen((1, 2, 3), (2,), (0.5,), ("bf16",), ("cosine",), (ADAM, SGD), together=1),
    *chosen((1, 2, 3), (2,), (0.5,), ("fp16",), ("decay",), (ADAM,)),
]
OTHERS = [
    configuration(1, 2, 1.0, "fp32", "none", ADAM, prescale_gradients=True),
    configuration(0, 2, 1.0, "fp32", "none", ADAM, gradient_predivide_factor=2.0),
    configuration(2, 2, 0.3, "fp32", "none", SGD, gradient_allreduce_op="sum"),
    configuration(2, 1, 1.0, "bf16", "none", ADAM, communication_data_type="fp32"),
    configuration(
        2, 2, 1.0, "fp32", "none", {"type": "Adam", "params": {"lr": 1e-2, "adam_w_mode": False, "weight_decay": 0.1}}
    ),
    configuration(2, 1, 1.0, "fp32", "none", {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}}),
    configuration(1, 2, 1.0, "fp32", "none", {"type": "Adagrad", "params": {"lr": 1e-2}}),
    configuration(2, 2, 0.3, "fp32", "cosine", {"type": "Adagrad", "params": {"lr": 1e-2}}),
    configuration(0, 3, 0.3, "fp32", "none", SGD, gradient_predivide_factor=4.0),
    configuration(3, 2, 1.0, "fp32", "cycle", ADAM),
    configuration(0, 2, 0.5, "fp32", "cycle", SGD),
    configuration(0, 1, 0.5, "bf16", "warmup", ADAM),
    configuration(3, 1, 0.0, "bf16", "none", SGD),
    configuration(2, 3, 0.3, "fp16", "range", ADAM),
    configuration(3, 2, None, "fp16", "cosine", SGD),
    configuration(1, 2, 1.0, "fp16", "none", ADAM, fp16=HALF | {"loss_scale": 64.0}),
    configuration(3, 2, 1.0, "bf16", "none", ADAM, communication_data_type="fp32"),
    configuration(1, 3, 0.3, "fp32", "decay", {"type": "SGD", "params": {"lr": 0.03, "weight_decay": 0.1}}),
]


@pytest.mark.slow  # (each configuration is compiled on its own)
@pytest.mark.parametrize("at", range(len(SWEEP) + len(OTHERS)))
def test_many_configurations_give_deepspeeds_numbers(two, deepspeeds, at):
    config = configuration(*SWEEP[at]) if at < len(SWEEP) else OTHERS[at - len(SWEEP)]
    low = "bf16" in config or "fp16" in config
    hold(two.run(curves, "zgraph", config), deepspeeds.run(curves, "deepspeed", config), low)

"""Scripts as posts on DeepSpeed write them, with the import changed."""

import argparse
import json

import pytest
import torch
from torch import nn

import zgraph.deepspeed as deepspeed
from zgraph.deepspeed.ops.adam import DeepSpeedCPUAdam
from zgraph.deepspeed.runtime.lr_schedules import WarmupDecayLR

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_group_left")]  # (a second each)
EAGER = {"zgraph": {"backend": "eager"}}


def net():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


def engine_of(model, stage=0, **others):
    optimizer = {"type": "Adam", "params": {"lr": 1e-3}}
    config = {"train_batch_size": 4, "optimizer": optimizer, "zero_optimization": {"stage": stage}, **EAGER, **others}
    return deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]


def test_cifar_with_arguments_a_file_and_a_data_set(tmp_path):
    config = {
        "train_batch_size": 4,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "initial_scale_power": 15,
        },
        "zero_optimization": {
            "stage": 0,
            "allgather_bucket_size": 50000000,
            "overlap_comm": True,
            "cpu_offload": False,
        },
    }
    (tmp_path / "ds.json").write_text(json.dumps(config | EAGER))
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(tmp_path / "ds.json")])
    model, data = net(), [(torch.randn(8), i % 4) for i in range(16)]
    trained = filter(lambda p: p.requires_grad, model.parameters())
    engine, _, loader, _ = deepspeed.initialize(args=args, model=model, model_parameters=trained, training_data=data)
    for x, y in loader:
        loss = nn.functional.cross_entropy(engine(x.half()).float(), y)
        engine.backward(loss)
        engine.step()
    assert engine.global_steps == 4 and engine.skipped_steps == 0


def test_two_engines_of_a_gan_meet_in_one_loss():
    one = engine_of(net(), 1)
    other = engine_of(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), 1)
    loss_fn, real, fake = nn.BCEWithLogitsLoss(), torch.ones(4, 1), torch.zeros(4, 1)
    before = [p.to_local().clone() for p in one.parameters()]
    for _ in range(2):
        made = one(torch.randn(4, 8))
        other.backward(loss_fn(other(made.detach()), fake) + loss_fn(other(torch.randn(4, 4)), real))
        other.step()
        one.backward(loss_fn(other(one(torch.randn(4, 8))), real))
        one.step()
    assert all(not torch.equal(p.to_local(), b) for p, b in zip(one.parameters(), before, strict=True))


def test_a_loss_as_the_tag_of_a_checkpoint(tmp_path):
    engine = engine_of(net(), 2)
    for _ in range(2):
        loss = engine(torch.randn(4, 8)).square().mean()
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(tmp_path, loss.item(), client_state={"step": 2})
    assert engine.load_checkpoint(tmp_path, loss.item())[1] == {"step": 2}


def test_a_frozen_backbone_whose_weights_are_gathered():
    model = net()
    model[0].requires_grad_(False)
    whole = model[0].weight.clone()
    engine = engine_of(model, 3)
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 8)).square().mean())
        engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=None):
        assert torch.equal(model[0].weight, whole)


def test_cpu_adam_with_a_schedule_object_and_offloading():
    model = net()
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-3, adamw_mode=True)
    schedule = WarmupDecayLR(optimizer, total_num_steps=10, warmup_max_lr=1e-3, warmup_num_steps=2)
    section = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = {"train_batch_size": 4, "zero_optimization": section, "zero_force_ds_cpu_optimizer": False, **EAGER}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    for _ in range(3):
        engine.backward(engine(torch.randn(4, 8)).square().mean())
        engine.step()
    assert engine.get_lr() == [pytest.approx(1e-3)]


def test_batches_and_outputs_that_are_dicts():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x=None, y=None, **others):
            logits = self.layer(x)
            return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}

    model, data = Named(), [{"x": torch.randn(8), "y": torch.tensor(i % 4)} for i in range(8)]
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, **EAGER}
    collate = torch.utils.data.default_collate
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, training_data=data, collate_fn=collate
    )
    for batch in loader:
        engine.backward(engine(**batch)["loss"])
        engine.step()
    assert engine.global_steps == 4


def test_evaluation_in_between_and_by_inference_mode():
    engine = engine_of(net(), 1)
    engine.backward(engine(torch.randn(4, 8)).sum())
    engine.step()
    engine.eval()
    with torch.inference_mode():
        assert engine(torch.randn(2, 8)).shape == (2, 4)
    with torch.no_grad():
        assert engine.module(torch.randn(3, 8)).shape == (3, 4)


def test_gradients_looked_at_before_the_step():
    engine = engine_of(net(), 3, gradient_clipping=0.1)
    engine.backward(engine(torch.randn(4, 8)).square().sum())
    norms = [deepspeed.utils.safe_get_full_grad(p).norm() for p in engine.module.parameters()]
    engine.step()
    assert float(engine.get_global_grad_norm()) == pytest.approx(float(torch.stack(norms).norm()), rel=1e-5)


def test_everything_on_the_host_in_bf16_saved_in_16_bits(tmp_path):
    section = {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    engine = engine_of(net(), bf16={"enabled": True}, fp16={"enabled": False}, zero_optimization=section)
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 8, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
    assert engine.save_16bit_model(tmp_path, "weights.bin")
    assert {v.dtype for v in torch.load(tmp_path / "weights.bin").values()} == {torch.bfloat16}


def test_torchs_one_cycle_moves_rates_and_betas():
    """(It writes numbers of its own into the groups.)"""

    def losses(by_engine):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-2, total_steps=6)
        step, found = model, []
        if by_engine:
            config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zgraph": {"backend": "eager"}}
            step, optimizer, _, schedule = deepspeed.initialize(
                model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
            )
        for number in range(5):
            loss = step(torch.full((2, 4), 1.0 + number)).square().mean()
            if by_engine:
                step.backward(loss)
                step.step()
            else:
                loss.backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            found += [loss.item(), optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"][0]]
        return found

    assert losses(True) == pytest.approx(losses(False), rel=1e-5)

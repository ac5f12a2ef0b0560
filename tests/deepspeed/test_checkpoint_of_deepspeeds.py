"""The engine goes on from what DeepSpeed itself has saved: by the schedule's rates, and with what the script has added."""

import importlib

import deepspeed_scripts
import pytest
import torch
import torch.distributed as dist
from torch import nn

CLIENT = {"epoch": 3, "best": [0.5, None], "names": {"run": "a"}, "mean": torch.arange(3.0), "when": pytest.approx}


def trained(system, folder, stage, steps, load=False):
    """Losses on this rank, the rates before the first step and behind the last, and the client state."""
    real = system == "deepspeed"
    module = deepspeed_scripts.ready() if real else importlib.import_module("zgraph.deepspeed")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 8}},
    }
    torch.manual_seed(int(load))
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    config = deepspeed_scripts.of_torch(config) if real else deepspeed_scripts.eager(config)
    engine, *_ = module.initialize(model=model, model_parameters=model.parameters(), config=config)
    client = engine.load_checkpoint(folder)[1] if load else None
    losses, before = [], engine.get_lr()
    for step in steps:
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if step == 2 and not load:
            engine.save_checkpoint(folder, client_state=CLIENT)
    return losses, before, engine.get_lr(), engine.global_steps, client


@pytest.mark.parametrize("saved, now", [(1, 0), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_the_engine_goes_on_from_deepspeeds_checkpoint(two, deepspeeds, tmp_path, saved, now):
    """(Its first step had the rate of the schedule's beginning, which is 0 here, and the script's own part was lost.)"""
    theirs = deepspeeds.run(trained, "deepspeed", str(tmp_path), saved, range(6))
    mine = two.run(trained, "zgraph", str(tmp_path), now, range(3, 6), True)
    for rank in range(2):
        losses, before, after, steps, client = mine[rank]
        assert losses == pytest.approx(theirs[rank][0][3:], abs=1e-5)
        assert before[0] > 1e-3 and after == pytest.approx(theirs[rank][2]) and steps == theirs[rank][3]
        assert client.pop("mean").tolist() == [0.0, 1.0, 2.0]
        assert client == {key: CLIENT[key] for key in ("epoch", "best", "names")}


def test_a_schedule_goes_on_beside_another_weight_decay(tmp_path):
    """(The plan's numbers hold then, with a warning, and the rate was that of the schedule's beginning for a step.)"""
    import zgraph.deepspeed as deepspeed

    rates = []
    for decay in (0.1, 0.2):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": decay}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 8}},
        }
        engine, *_ = deepspeed.initialize(model=nn.Linear(3, 2), config=deepspeed_scripts.eager(config))
        if rates:
            engine.load_checkpoint(str(tmp_path))
        else:
            for _ in range(3):
                engine.backward(engine(torch.ones(2, 3)).mean())
                engine.step()
            engine.save_checkpoint(str(tmp_path))
        rates += engine.get_lr()
        assert engine.optimizer.param_groups[0]["weight_decay"] == decay
    assert rates[0] == rates[1] > 0

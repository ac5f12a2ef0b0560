"""`fp16=True` of TrainingArguments: losses, skipped steps and rates are those of a Trainer with torch's GradScaler over DistributedDataParallel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ranks import Ranks
from trainers import EAGER, ONE, as_launched, history, trainer_of

import zgraph
from zgraph.errors import PlanError
from zgraph.hf.loss_scaling import loss_scale_of
from zgraph.update import scaler

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def run(folder: str, plan: dict[str, Any] | None, optim: str, resume: str | None = None, steps: int = 8) -> Any:
    """What was logged of a run whose first scale overflows, and the scale after it. (On the CPU accelerate makes no GradScaler: it is given one.)"""
    with as_launched():
        options = {"fp16": True, "eval_strategy": "no", "save_steps": 4, "lr_scheduler_type": "linear", "optim": optim}
        trainer = trainer_of("gpt2", folder, steps, lengths=ONE, **options)
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19, growth_interval=3)
        trainer.accelerator.native_amp = True
        if plan is not None:
            zgraph.hf.attach(trainer, zgraph.Plan(**EAGER, **plan))
        trainer.train(resume_from_checkpoint=resume)
        return history(trainer), trainer.accelerator.scaler.get_scale(), next(trainer.model.parameters()).dtype


@pytest.mark.gloo
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.slow
def test_a_run_in_fp16_is_that_of_ddp_with_its_scaler(two: Ranks, tmp_path, optim):
    plain = two.run(run, str(tmp_path / "plain"), None, optim)
    mine = two.run(run, str(tmp_path / "mine"), {"zero": 2}, optim)
    skipped = [not math.isfinite(entry["grad_norm"]) for entry in plain[0][0]]
    assert any(skipped) and not all(skipped), skipped
    for (one, scale, held), (other, expected, _) in zip(mine, plain, strict=True):
        assert scale == expected and held is torch.float32
        for entry, wanted in zip(one, other, strict=True):
            assert entry["learning_rate"] == wanted["learning_rate"]
            assert math.isfinite(entry["grad_norm"]) == math.isfinite(wanted["grad_norm"])
            assert entry["loss"] == pytest.approx(wanted["loss"], rel=2e-3)
    again = two.run(run, str(tmp_path / "mine"), {"zero": 2}, optim, str(tmp_path / "mine" / "checkpoint-4"))
    assert [e["loss"] for e in again[0][0]][-4:] == pytest.approx([e["loss"] for e in mine[0][0]][-4:], rel=1e-6)
    assert again[0][1] == mine[0][1]


def test_the_scale_goes_the_way_of_torchs():
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    theirs.scale(torch.zeros(()))
    record = loss_scale_of(theirs)
    state = scaler.initial(record)
    for bad in [0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0]:
        assert float(state["scale"]) == theirs.get_scale()
        parameter.grad = torch.tensor(float("inf") if bad else 0.0)
        theirs.step(optimizer)
        theirs.update()
        state = scaler.advance(record, state, torch.tensor(bool(bad)))


def test_a_scaler_of_other_factors_is_refused():
    for options in ({"growth_factor": 4.0}, {"backoff_factor": 0.25}, {"init_scale": 1000.0}):
        with pytest.raises(PlanError, match="can't scale losses"):
            loss_scale_of(torch.amp.GradScaler("cpu", **options))

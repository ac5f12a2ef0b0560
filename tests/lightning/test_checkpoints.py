"""Checkpoints of Lightning's own calls hold whole weights and states: a run goes on from them on any number of ranks, by a plan or without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks
from sweeps import sweep

pytest.importorskip("lightning.pytorch")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_modules import OneModel, ScaledModel, TwoModels, as_launched, rows, strategy_of, trained, trainer_of

import zgraph
from zgraph.api import full_state_dict
from zgraph.lightning import ZGraphStrategy

KINDS = {"ScaledModel": ScaledModel, "TwoModels": TwoModels}


def saved_by(trainer: pl.Trainer, model: Any) -> str:
    return trainer.checkpoint_callback.last_model_path


def run(kind: str, plan: dict[str, Any] | None, folder: str, epochs: int, size: int, ckpt: str | None) -> Any:
    """(what was seen, the last checkpoint's path)"""
    kept = ModelCheckpoint(folder, save_last=True, save_top_k=1, monitor="val")
    options = {"callbacks": [kept], "enable_checkpointing": True, "max_epochs": epochs, "gradient_clip_val": 0.5}
    return trained(KINDS[kind], plan, None, saved_by, ckpt, rows_of={"size": size}, **options)


def mean(found: list[Any], what: str = "loss") -> list[float]:
    """The mean over ranks."""
    return [sum(values) / len(values) for values in zip(*(seen[what] for seen, _ in found), strict=True)]


@pytest.mark.gloo
@sweep("kind", ["TwoModels", "ScaledModel"], quick=1)
def test_a_run_goes_on_on_other_ranks_and_with_or_without_a_plan(two: Ranks, tmp_path, kind):
    folders = [str(tmp_path / name) for name in ("plain", "mine", "on", "back")]
    expected = two.run(run, kind, None, folders[0], 3, 2, None)
    losses, norms = mean(expected), mean(expected, "norm")
    first = two.run(run, kind, {"zero": 3}, folders[1], 1, 2, None)
    assert mean(first) == pytest.approx(losses[:6], rel=1e-5)
    alone = run(kind, {"zero": 2}, folders[2], 2, 4, first[0][1])
    assert alone[0]["loss"] == pytest.approx(losses[6:12], rel=1e-5)
    assert alone[0]["norm"] == pytest.approx(norms[6:12], rel=1e-5)
    again = two.run(run, kind, {"zero": 1}, folders[3], 3, 2, alone[1])
    assert mean(again) == pytest.approx(losses[12:], rel=1e-5)
    plain = two.run(run, kind, None, folders[3], 3, 2, alone[1])
    assert mean(plain) == pytest.approx(losses[12:], rel=1e-5)
    mine, theirs = (torch.load(path, weights_only=False) for path in (again[0][1], expected[0][1]))
    assert mine.keys() == theirs.keys()
    torch.testing.assert_close(mine["state_dict"], theirs["state_dict"], rtol=1e-4, atol=1e-5)
    for one, other in zip(mine["optimizer_states"], theirs["optimizer_states"], strict=True):
        torch.testing.assert_close(one["state"], other["state"], rtol=1e-4, atol=1e-5)
        assert one["param_groups"] == other["param_groups"]


def test_an_optimizer_over_several_parts_is_saved_once_each_of_them_is_ready(monkeypatch: pytest.MonkeyPatch):
    parts = {name: zgraph.compile(torch.nn.Linear(2, 2), zgraph.Plan(backend="eager")) for name in ("one", "two")}
    params = [p for part in parts.values() for p in part.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    for part in parts.values():
        part(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    asked, ready = [], full_state_dict.ready
    monkeypatch.setattr(full_state_dict, "ready", lambda model, what: (asked.append(model), ready(model, what))[1])
    strategy = ZGraphStrategy()
    strategy.parts = parts
    state = strategy.optimizer_state(optimizer)["state"]
    assert asked == list(parts.values())
    assert [torch.equal(kept["momentum_buffer"], p.grad) for kept, p in zip(state.values(), params, strict=True)] == [
        True
    ] * 4


def test_a_file_is_loaded_by_lightning_alone_and_evaluated_by_a_plan(tmp_path):
    with as_launched():
        trainer, model = trainer_of(strategy_of({})), OneModel()
        trainer.fit(model, rows(OneModel, 4))
        trainer.save_checkpoint(path := tmp_path / "weights.ckpt", weights_only=True)
        trainer.test(model, rows(OneModel, 8, 5), verbose=False)
        plain = OneModel.load_from_checkpoint(path)
        torch.testing.assert_close(plain.state_dict(), {n: v.full_tensor() for n, v in model.state_dict().items()})
        other = OneModel()
        trainer_of(strategy_of({})).test(other, rows(OneModel, 8, 5), ckpt_path=path, verbose=False)
        assert other.seen["test"] == model.seen["test"]

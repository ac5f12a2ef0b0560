"""A LightningModule trains by a plan, with the numbers of Lightning's DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks
from sweeps import sweep

pytest.importorskip("lightning.pytorch")

from lightning_modules import OneModel, OwnLayers, PartsOfAModel, Texts, TwoModels, rows, trained

TOLERANCE = {"rel": 1e-5, "abs": 1e-6}
SELF = "self"


def equal(mine: dict[str, list[float]], theirs: dict[str, list[float]]) -> None:
    assert {k: len(v) for k, v in mine.items()} == {k: len(v) for k, v in theirs.items()}
    for what, values in theirs.items():
        assert mine[what] == pytest.approx(values, **TOLERANCE), what


def evaluated(trainer: Any, model: Any) -> Any:
    """What test and predict give after a run; of predict ranks have different numbers of batches."""
    trainer.test(model, rows(type(model), 9), verbose=False)
    return [p.detach() for p in trainer.predict(model, rows(type(model), 9))]


KINDS = {kind.__name__: kind for kind in (OneModel, OwnLayers, PartsOfAModel, Texts, TwoModels)}


def run(kind: str, plan: dict[str, Any] | None, modules: Any, options: dict[str, Any]) -> Any:
    return trained(KINDS[kind], plan, modules, evaluated, **options)


RUNS = [
    ("OneModel", None, 3, {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}),
    ("TwoModels", None, 3, {"gradient_clip_val": 0.3}),
    ("OwnLayers", SELF, 1, {"accumulate_grad_batches": 3}),
    ("Texts", None, 3, {"accumulate_grad_batches": 2}),
    ("Texts", None, 0, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    ("OneModel", "model", 1, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
    ("TwoModels", SELF, 3, {"accumulate_grad_batches": 2}),
    ("PartsOfAModel", ["model.0", "model.2"], 3, {"gradient_clip_val": 0.1}),
    ("TwoModels", None, 2, {"gradient_clip_val": 0.3}),
]


@pytest.mark.gloo
@sweep("kind, modules, zero, options", RUNS, quick=(0, 8))
def test_a_run_on_two_ranks_is_that_of_ddp(two: Ranks, kind, modules, zero, options):
    plain = two.run(run, kind, None, None, options)
    mine = two.run(run, kind, {"zero": zero}, modules, options)
    for (one, predicted), (other, expected) in zip(mine, plain, strict=True):
        equal(one, other)
        assert len(predicted) == len(expected) > 0
        for a, b in zip(predicted, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


class Placements(OneModel):
    """Notes how gradients are divided after each backward."""

    def on_after_backward(self):
        self.seen["test"].append(type(self.model[0].weight.grad.placements[0]).__name__)


def placements(zero: int) -> list[str]:
    return trained(Placements, {"zero": zero}, accumulate_grad_batches=2)[0]["test"]


@pytest.mark.gloo
def test_accumulated_gradients_are_reduced_once_a_step(two: Ranks):
    assert two.run(placements, 1) == [["Partial", "Shard"] * 3] * 2

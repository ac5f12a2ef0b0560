"""Thirty steps of a LightningModule on two ranks are Lightning's DDP's: losses, gradient norms, evaluations, and losses after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks

pytest.importorskip("lightning")

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_modules import Texts, TwoModels, trained

STEPS, HALF = 30, 15
TOLERANCE = {"rel": 1e-5, "abs": 1e-5}


def rate(self: Any) -> Any:
    optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)
    return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5), "interval": "step"}]


class LongTexts(Texts):
    """Has rates that stay."""

    configure_optimizers = rate


class LongTwoModels(TwoModels):
    """Has rates that stay."""

    configure_optimizers = rate


KINDS = {"Texts": LongTexts, "TwoModels": LongTwoModels}


def run(kind: str, plan: dict[str, Any] | None, folder: str, ckpt: str | None) -> Any:
    """(what was seen of two epochs, the checkpoint after the first)"""
    kept = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    options = {"callbacks": [kept], "enable_checkpointing": True, "max_epochs": STEPS // HALF, "gradient_clip_val": 0.3}
    seen, _ = trained(KINDS[kind], plan, None, None, ckpt, rows_of={"count": 2 * 2 * HALF}, **options)
    return seen


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("kind, zero", [("Texts", 3), ("TwoModels", 2)])
def test_thirty_steps(two: Ranks, tmp_path: Path, kind: str, zero: int):
    plain = two.run(run, kind, None, str(tmp_path / "plain"), None)
    mine = two.run(run, kind, {"zero": zero}, str(tmp_path / "mine"), None)
    half = str(tmp_path / "mine" / "epoch=0.ckpt")
    resumed = two.run(run, kind, {"zero": zero}, str(tmp_path / "again"), half)
    for one, again, other in zip(mine, resumed, plain, strict=True):
        assert len(other["loss"]) == len(other["norm"]) == STEPS and other["val"]
        for what, values in other.items():
            assert one[what] == pytest.approx(values, **TOLERANCE), what
            if again[what]:
                assert again[what] == pytest.approx(values[-len(again[what]) :], **TOLERANCE), what
        assert len(again["loss"]) == len(again["norm"]) == HALF
    worst = max(
        abs(a - b) for what in ("loss", "norm", "val") for a, b in zip(mine[0][what], plain[0][what], strict=True)
    )
    print(f"largest difference {worst:.1e}")

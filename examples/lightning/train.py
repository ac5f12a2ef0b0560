"""A LightningModule of a few lines, trained by a plan on as many ranks as are asked for, with the same rows a step.

python examples/lightning/train.py --devices 2
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zgraph
from zgraph.lightning import ZGraphStrategy


class Lit(pl.LightningModule):
    """Learns the sine of the sum of four numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = F.mse_loss(self.model(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        x, y = batch
        self.log("error", F.mse_loss(self.model(x), y), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def rows(count: int, seed: int, batch: int) -> DataLoader:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--folder", default=str(Path(tempfile.gettempdir()) / "zgraph-lightning"))
    parser.add_argument("--backend", default="eager", choices=["eager", "inductor"])
    options = parser.parse_args()
    pl.seed_everything(0, verbose=False)
    model = Lit()
    saved = ModelCheckpoint(options.folder, filename="best", monitor="error", enable_version_counter=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=ZGraphStrategy(zgraph.Plan(zero=3, backend=options.backend)),
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        callbacks=[saved],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    each = 32 // options.devices
    train, held_out = rows(256, 1, each), rows(64, 2, each)
    before = trainer.validate(model, held_out, verbose=False)[0]["error"]
    trainer.fit(model, train, held_out)
    after = trainer.validate(model, held_out, verbose=False, ckpt_path="best")[0]["error"]
    if trainer.is_global_zero:
        plain = Lit.load_from_checkpoint(saved.best_model_path)  # whole weights, in one file
        numbers = sum(p.numel() for p in plain.parameters())
        print(f"{numbers} numbers, error {before:.2f} -> {after:.2f}")


if __name__ == "__main__":
    main()

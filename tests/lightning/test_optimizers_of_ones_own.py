"""Optimizers of torch and of one's own update shards as they update whole weights, also where they read numbers of whole weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks
from sweeps import sweep

pytest.importorskip("lightning.pytorch")

from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_modules import OneModel, as_launched, rows, strategy_of, trained, trainer_of

import zgraph
from zgraph.errors import ModelError
from zgraph.lightning import fabric as of_fabric


class Lamb(torch.optim.Optimizer):
    """Reads the norms of a weight and of its update as numbers, as optimizers written for whole weights do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                update = p.grad / (p.grad.abs().mean() + 1e-3)
                trust = p.norm().item() / max(update.norm().item(), 1e-6)
                clipped = max(0.1, p.square().sum())  # (a tensor or a number)
                p.add_(update, alpha=-group["lr"] * trust * float(clipped))
        return loss


class Bounded(torch.optim.Optimizer):
    """Uses an operator that torch does not have for shards."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and p.ndim == 2:
                p.sub_(p.grad / torch.pdist(p).max())


OPTIMIZERS = {
    "Adafactor": lambda params: torch.optim.Adafactor(params, 1e-2),
    "Adafactor of several": lambda params: torch.optim.Adafactor(params, 1e-2, foreach=True),
    "Rprop": lambda params: torch.optim.Rprop(params, 1e-3),
    "norms": lambda params: Lamb(params, 1e-3),
    "NAdam": lambda params: torch.optim.NAdam(params, 1e-2),
    "ASGD": lambda params: torch.optim.ASGD(params, 1e-2),
    "Bounded": Bounded,
}


def module(name: str) -> type[OneModel]:
    class Module(OneModel):
        """Trains with this optimizer."""

        def configure_optimizers(self) -> Any:
            return OPTIMIZERS[name](self.parameters())

    return Module


def run(name: str, plan: dict[str, Any] | None, folder: str, epochs: int, ckpt: str | None = None) -> Any:
    """(what was seen, the last checkpoint's path)"""
    options = {
        "callbacks": [ModelCheckpoint(folder, save_last=True)],
        "enable_checkpointing": True,
        "max_epochs": epochs,
    }
    return trained(module(name), plan, None, lambda t, _: t.checkpoint_callback.last_model_path, ckpt, **options)


@pytest.mark.gloo
@sweep("name", [n for n in OPTIMIZERS if n != "Bounded"], quick=(2,))
def test_an_optimizer_is_as_over_ddp_and_goes_on(two: Ranks, tmp_path, name):
    plain = two.run(run, name, None, str(tmp_path / "plain"), 2)
    half = two.run(run, name, {"zero": 3}, str(tmp_path / "half"), 1)
    mine = two.run(run, name, {"zero": 3}, str(tmp_path / "mine"), 2, half[0][1])
    for (first, _), (then, _), (theirs, _) in zip(half, mine, plain, strict=True):
        assert first["loss"] + then["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert first["norm"] + then["norm"] == pytest.approx(theirs["norm"], rel=1e-5)
    one, other = (torch.load(found[0][1], weights_only=False) for found in (mine, plain))
    torch.testing.assert_close(one["state_dict"], other["state_dict"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one["optimizer_states"], other["optimizer_states"], rtol=1e-4, atol=1e-5)


def of_fabrics(plan: dict[str, Any] | None, world: int) -> list[float]:
    with as_launched():
        strategy = "ddp" if plan is None else of_fabric.ZGraphStrategy(zgraph.Plan(backend="eager", **plan))
        fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
        fabric.launch()
        model = OneModel().model
        model, optimizer = fabric.setup(model, Lamb(model.parameters(), 1e-3))
        seen = []
        for x, y in fabric.setup_dataloaders(rows(OneModel)):

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = (model(x) - y).square().mean()
                fabric.backward(loss)
                return loss

            seen.append(float(optimizer.step(closure=closure)))
        return seen


@pytest.mark.gloo
def test_fabric_gives_it_whole_numbers_too(two: Ranks):
    plain, mine = two.run(of_fabrics, None, 2), two.run(of_fabrics, {"zero": 3}, 2)
    for one, other in zip(mine, plain, strict=True):
        assert len(other) == 6 and one == pytest.approx(other, rel=1e-5)


def test_an_operator_that_shards_have_not_is_refused():
    with as_launched(), pytest.raises(ModelError, match="Bounded can't update weights that are divided") as caught:
        trainer_of(strategy_of({"zero": 3})).fit(module("Bounded")(), rows(OneModel))
    assert "zero=0" in str(caught.value)

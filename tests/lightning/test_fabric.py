"""Lightning's Fabric on compiled modules, with the numbers of its DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import nn

pytest.importorskip("lightning.pytorch")

from lightning.fabric import Fabric
from lightning_modules import OneModel, TwoModels, as_launched, rows

import zgraph
from zgraph.errors import ModelError, PlanError, ZgraphError
from zgraph.lightning import fabric as of_fabric


def fabric_of(plan: dict[str, Any] | None, world: int = 1, **options: Any) -> Fabric:
    strategy = "ddp" if plan is None else of_fabric.ZGraphStrategy(zgraph.Plan(**{"backend": "eager", **plan}))
    made = Fabric(accelerator="cpu", devices=world, strategy=strategy, **options)
    made.launch()
    return made


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 3))


def train(plan: dict[str, Any] | None, folder: str, world: int, size: int, load: bool, precision: Any = None) -> Any:
    """Losses and norms of an epoch with accumulation and clipping, saved at its end."""
    with as_launched():
        fabric = fabric_of(plan, world, precision=precision)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = fabric.setup(model, optimizer)
        loader = fabric.setup_dataloaders(rows(OneModel, 16, size=size))
        state = {"model": model, "optimizer": optimizer, "epoch": 0}
        if load:
            fabric.load(f"{folder}/run.ckpt", state)
        seen = []
        for number, (x, y) in enumerate(loader):
            last = number % 2 == 1
            with fabric.no_backward_sync(model, enabled=not last):
                loss = nn.functional.mse_loss(model(x), y)
                fabric.backward(loss / 2)
            seen.append(float(loss))
            if last:
                seen.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.5)))
                optimizer.step()
                optimizer.zero_grad()
        state["epoch"] += 1
        fabric.save(f"{folder}/run.ckpt", state)
        model.eval()
        with torch.no_grad():
            seen.append(float(model(torch.ones(2, 6)).sum()))
        return seen, state["epoch"]


def mean(found: list[Any]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*(seen for seen, _ in found), strict=True)]


@pytest.mark.gloo
def test_a_loop_is_that_of_ddp_and_goes_on_on_one_rank(two: Ranks, tmp_path):
    folders = [str(tmp_path / name) for name in ("plain", "mine")]
    for load in (False, True):
        plain = two.run(train, None, folders[0], 2, 2, load)
        mine = (
            two.run(train, {"zero": 3}, folders[1], 2, 2, load)
            if not load
            else [train({"zero": 2}, folders[1], 1, 4, load)]
        )
        assert mean(mine) == pytest.approx(mean(plain), rel=1e-5, abs=1e-6)
        assert mine[0][1] == plain[0][1] == 1 + load


@pytest.mark.gloo
@pytest.mark.slow
def test_mixed_precision_is_that_of_ddp(two: Ranks, tmp_path):
    plain = two.run(train, None, str(tmp_path / "plain"), 2, 2, False, "bf16-mixed")
    mine = two.run(train, {"zero": 3}, str(tmp_path / "mine"), 2, 2, False, "bf16-mixed")
    assert mean(mine) == pytest.approx(mean(plain), rel=1e-3)


def steps_of_a_module(plan: dict[str, Any] | None) -> list[float]:
    """The steps of a LightningModule in a loop of Fabric's."""
    with as_launched():
        fabric, model = fabric_of(plan, 2), TwoModels()
        model.log = lambda *args, **more: None
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
        model, optimizer = fabric.setup(model, optimizer)
        for number, batch in enumerate(fabric.setup_dataloaders(rows(TwoModels, 8))):
            fabric.backward(model.training_step(batch, number))
            optimizer.step()
            optimizer.zero_grad()
        return model.module.seen["loss"]


@pytest.mark.gloo
@pytest.mark.slow
def test_a_lightning_module_is_that_of_ddp(two: Ranks):
    for mine, plain in zip(two.run(steps_of_a_module, {"zero": 3}), two.run(steps_of_a_module, None), strict=True):
        assert mine == pytest.approx(plain, rel=1e-5) and len(mine) == 2


def test_the_plans_optimizer_and_what_is_refused():
    with as_launched():
        fabric = fabric_of({"optimizer": zgraph.AdamW(lr=1e-2)})
        made = torch.optim.AdamW((model := network()).parameters())
        with pytest.raises(PlanError, match="given another"):
            fabric.setup(model, made)
        model = fabric.setup_module(network())
        optimizer = fabric.setup_optimizers(model.module.zgraph.optimizer)
        before = model(torch.ones(2, 6)).square().mean()
        fabric.backward(before)
        optimizer.step()
        assert model(torch.ones(2, 6)).square().mean() < before
        with pytest.raises(ModelError, match="without the plan"):
            fabric.backward(torch.ones(2, requires_grad=True).sum())


def test_a_model_of_lightnings_own_is_compiled():
    from lightning.pytorch.demos.transformer import Transformer

    with as_launched():
        model = fabric_of({}).setup_module(Transformer(vocab_size=9, ninp=8, nhid=8, nlayers=1))
        assert model(torch.ones(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long)).shape == (4, 9)
        assert model.module.zgraph.programs


@pytest.mark.parametrize(
    ("plan", "options", "kind", "said"),
    [
        ({"micro_batches": 2}, {}, PlanError, "accumulate_grad_batches"),
        ({"precision": "bf16"}, {"precision": "bf16-mixed"}, PlanError, "leave one of them out"),
    ],
)
def test_a_plan_that_clashes(plan, options, kind: type[ZgraphError], said):
    with as_launched():
        fabric = fabric_of(plan, **options)
        with pytest.raises(kind, match=said):
            fabric.setup(network())


def test_an_optimizer_that_has_made_steps():
    with as_launched():
        model = network()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        with pytest.raises(ModelError, match="has made steps"):
            fabric_of({}).setup(model, optimizer)


def test_the_strategy_has_its_name():
    assert isinstance(Fabric(accelerator="cpu", strategy="zgraph").strategy, of_fabric.ZGraphStrategy)

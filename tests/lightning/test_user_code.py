"""Modules, callbacks and precisions that the strategy was not written for train by a plan as over Lightning's DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import Ranks
from torch import nn

pytest.importorskip("lightning.pytorch")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, EarlyStopping, GradientAccumulationScheduler, ModelSummary
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.tuner import Tuner
from lightning_modules import Notes, OneModel, Texts, TwoModels, as_launched, rows, strategy_of, trained, trainer_of

import zgraph


class Average(pl.Callback):
    """A moving average of the weights, which are evaluated by it."""

    def on_fit_start(self, trainer, model):
        self.average = {n: p.detach().clone() for n, p in model.named_parameters()}

    def on_train_batch_end(self, trainer, model, *rest):
        for name, param in model.named_parameters():
            self.average[name].lerp_(param.detach(), 0.3)

    def on_validation_start(self, trainer, model):
        for name, param in model.named_parameters():
            now = param.detach().clone()
            param.data.copy_(self.average[name])
            self.average[name].copy_(now)

    on_validation_end = on_validation_start


class Rates(pl.Callback):
    def on_train_batch_start(self, trainer, model, batch, index):
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.01 * (index + 1)


class Gan(Notes):
    """Two optimizers, by manual optimization."""

    def make(self):
        self.automatic_optimization = False
        self.maker = nn.Linear(4, 6)
        self.judge = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, index):
        of_maker, of_judge = self.optimizers()
        made = self.maker(batch[1][:, [0, 1, 2, 0]])
        self.toggle_optimizer(of_maker)
        self.turn(of_maker, F.softplus(-self.judge(made)).mean())
        self.toggle_optimizer(of_judge)
        made = self.maker(batch[1][:, [0, 1, 2, 0]]).detach()
        self.turn(of_judge, F.softplus(-self.judge(batch[0])).mean() + F.softplus(self.judge(made)).mean())

    def turn(self, optimizer, loss):
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)
        self.note("loss", loss)

    def on_before_optimizer_step(self, optimizer):
        pass  # (the norm is over both)

    def loss(self, batch):
        return self.judge(batch[0]).mean()

    def configure_optimizers(self):
        return [torch.optim.Adam(m.parameters(), 1e-2) for m in (self.maker, self.judge)]


class Teacher(OneModel):
    """Has a frozen module in eval mode, and a mean and variance that batches change. (In float64: two rows normalised as a batch are nearly 1 and -1,
    whatever they were, and a rounding is large beside what is left.)"""

    def make(self):
        # (a bias would have a gradient of nothing but rounding, of which Adam makes whole steps)
        self.model = nn.Sequential(nn.Linear(6, 9, bias=False), nn.BatchNorm1d(9), nn.Linear(9, 3))
        self.teacher = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)).eval().requires_grad_(False)

    def loss(self, batch):
        with torch.no_grad():
            taught = self.teacher(batch[0])
        return F.mse_loss(self.model(batch[0]), taught + batch[1])


class Logs(OneModel):
    """Adds a penalty on its weights, and logs norms of weights and gradients as Lightning has them."""

    def loss(self, batch):
        penalty = sum(p.square().sum() for p in self.parameters())
        whole = penalty.full_tensor() if isinstance(penalty, torch.distributed.tensor.DTensor) else penalty
        return super().loss(batch) + 0.05 * whole

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        self.log("gradients", torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]))
        self.log_dict({"weight": self.model[0].weight.norm()}, sync_dist=True)


class Branches(TwoModels):
    """Calls one of its modules at every other step alone, and returns a dict."""

    def training_step(self, batch, index):
        loss = self.encoder(batch[0]).square().mean() if index % 2 else self.loss(batch)
        self.note("loss", loss)
        return {"loss": loss, "rows": len(batch[0])}


class Late(OneModel):
    """Makes its model when ranks are there."""

    def make(self):
        self.model = None

    def configure_model(self):
        if self.model is None:
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 3))


class Measured(OneModel):
    def make(self):
        super().make()
        torchmetrics = pytest.importorskip("torchmetrics")
        self.error = torchmetrics.MeanSquaredError()

    def loss(self, batch):
        found = self.model(batch[0])
        self.error(found.detach(), batch[1])
        self.log("error", self.error, on_epoch=True, on_step=False)
        return F.mse_loss(found, batch[1])


class Plateau(OneModel):
    def configure_optimizers(self):
        first, *others = self.parameters()
        groups = [{"params": [first], "lr": 0.1}, {"params": others}]
        optimizer = torch.optim.AdamW(groups, 1e-2, fused=True)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}


def scaled() -> MixedPrecision:
    """fp16 whose first step overflows (Lightning itself would take bf16 on a CPU)."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**18))


def several() -> list[pl.Callback]:
    return [GradientAccumulationScheduler({0: 2, 1: 3}), EarlyStopping("val"), ModelSummary()]


CASES: dict[str, tuple[type[Notes], dict[str, Any]]] = {
    "moving average": (OneModel, {"callbacks": lambda: [Average()], "max_epochs": 2}),
    "learning rate": (OneModel, {"callbacks": lambda: [Rates()]}),
    "two optimizers": (Gan, {}),
    "teacher": (Teacher, {"gradient_clip_val": 0.1, "precision": "64-true"}),
    "logs": (Logs, {"accumulate_grad_batches": 2}),
    "branches": (Branches, {}),
    "late": (Late, {}),
    "metrics": (Measured, {"max_epochs": 2}),
    "plateau": (Plateau, {"max_epochs": 4}),
    "callbacks": (OneModel, {"callbacks": several, "max_epochs": 3}),
    "anomalies": (OneModel, {"detect_anomaly": True, "max_steps": 2}),
    "bf16-mixed": (OneModel, {"precision": "bf16-mixed", "gradient_clip_val": 0.2}),
    "bf16-true": (OneModel, {"precision": "bf16-true"}),
    "16-true": (OneModel, {"precision": "16-true"}),
    "64-true": (OneModel, {"precision": "64-true"}),
    "16-mixed": (OneModel, {"plugins": lambda: [scaled()], "gradient_clip_val": 0.2}),
}
TOLERANCE = {"bf16-true": 1e-2, "16-true": 1e-2}
QUICK = ["two optimizers"]


def run(name: str, plan: dict[str, Any] | None) -> Any:
    kind, options = CASES[name]
    given = {k: v() if isinstance(v, Callable) else v for k, v in options.items()}
    return trained(
        kind, plan, None, lambda trainer, _: {k: float(v) for k, v in trainer.callback_metrics.items()}, **given
    )


def equal(mine: Any, plain: Any, rel: float = 1e-5) -> None:
    for (one, logged), (other, expected) in zip(mine, plain, strict=True):
        for what, values in other.items():
            assert one[what] == pytest.approx(values, rel=rel, abs=1e-6, nan_ok=True), what
        assert logged == pytest.approx(expected, rel=rel, abs=1e-6, nan_ok=True)


@pytest.mark.gloo
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_two_ranks_are_as_over_ddp(two: Ranks, name):
    plain = two.run(run, name, None)
    equal(two.run(run, name, {"zero": 3}), plain, TOLERANCE.get(name, 1e-5))


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("name", ["two optimizers", "logs", "branches"])
def test_other_stages_are_as_over_ddp(two: Ranks, name, zero):
    equal(two.run(run, name, {"zero": zero}), two.run(run, name, None))


def thirty_steps(plan: dict[str, Any] | None) -> Any:
    options = {"gradient_clip_val": 0.2, "accumulate_grad_batches": 2, "max_epochs": -1, "max_steps": 30}
    return trained(Texts, plan, None, lambda trainer, _: {}, **options)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_thirty_steps_of_texts_of_all_lengths(two: Ranks, zero):
    plain = two.run(thirty_steps, None)
    assert len(plain[0][0]["norm"]) == 30
    equal(two.run(thirty_steps, {"zero": zero}), plain)


class Thaws(BaseFinetuning):
    def freeze_before_training(self, model):
        self.freeze(model.encoder)

    def finetune_function(self, model, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(model.encoder, optimizer, lr=1e-2)


def thawed(plan: dict[str, Any] | None, size: int) -> Any:
    return trained(TwoModels, plan, rows_of={"size": size}, callbacks=[Thaws()], max_epochs=3)[0]


@pytest.mark.gloo
@pytest.mark.slow
def test_what_is_unfrozen_later_trains_as_on_one_rank(two: Ranks):
    """(DDP averages no gradient of what was frozen when it began.)"""
    expected, found = thawed(None, 4), two.run(thawed, {"zero": 2}, 2)
    assert found[0]["norm"] == pytest.approx(expected["norm"], rel=1e-5)
    assert [sum(v) / 2 for v in zip(*(f["loss"] for f in found), strict=True)] == pytest.approx(
        expected["loss"], rel=1e-5
    )


class SeveralLoaders(OneModel):
    def validation_step(self, batch, index, dataloader_idx=0):
        self.seen["val"].append(float(self.loss(batch)))

    def predict_step(self, batch, index, dataloader_idx=0):
        return self.model(batch[0])


def many_calls(plan: dict[str, Any] | None) -> Any:
    """Evaluations before, between and after two runs; loaders of which ranks have different numbers of batches."""
    with as_launched():
        model, trainer = SeveralLoaders(), trainer_of(strategy_of(plan))
        trainer.validate(model, rows(OneModel, 8), verbose=False)
        trainer.fit(model, rows(OneModel, 8))
        trainer.test(model, rows(OneModel, 8), verbose=False)
        trainer = trainer_of(strategy_of(plan), max_epochs=2, use_distributed_sampler=False)
        trainer.fit(model, rows(OneModel, 8), [rows(OneModel, 6 if dist.get_rank() else 8), rows(OneModel, 8, 9)])
        found = trainer.predict(model, [rows(OneModel, 7), rows(OneModel, 4)])
        return model.seen, {"sum": float(sum(part.sum() for parts in found for part in parts))}


@pytest.mark.gloo
@pytest.mark.slow
def test_calls_of_trainers_one_after_the_other(two: Ranks):
    equal(two.run(many_calls, {"zero": 3}), two.run(many_calls, None))


class Breaks(OneModel):
    def predict_step(self, batch, index):
        if index:
            raise ValueError("the user's own")
        return self.model(batch[0])


def broken_off(plan: dict[str, Any] | None) -> Any:
    """A run after an evaluation with whole weights that an error ended."""
    with as_launched():
        model = Breaks()
        with pytest.raises(ValueError, match="the user's own"):
            trainer_of(strategy_of(plan)).predict(model, rows(OneModel, 9))
        trainer_of(strategy_of(plan)).fit(model, rows(OneModel, 8))
        return model.seen, {}


@pytest.mark.gloo
@pytest.mark.slow
def test_a_run_after_an_evaluation_that_an_error_ended(two: Ranks):
    equal(two.run(broken_off, {"zero": 3}), two.run(broken_off, None))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        made = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(6):
            yield torch.randn(6, generator=made), torch.randn(3, generator=made)


def tuned(plan: dict[str, Any] | None, folder: str) -> Any:
    """A search for a learning rate, which saves the model and loads it again, and a run on streams."""
    with as_launched():
        model = OneModel()
        model.lr = 1e-2
        model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), model.lr)
        options = {"max_epochs": -1, "max_steps": 3}
        trainer = trainer_of(strategy_of(plan), folder, **options)
        tried = Tuner(trainer).lr_find(model, rows(OneModel), num_training=8, update_attr=False)
        trainer.fit(model, torch.utils.data.DataLoader(Stream(), 2))
        return {**model.seen, "tried": list(tried.results["loss"])}, {}


@pytest.mark.gloo
@pytest.mark.slow
def test_a_search_for_a_rate_and_a_stream(two: Ranks, tmp_path):
    equal(two.run(tuned, {"zero": 3}, str(tmp_path)), two.run(tuned, None, str(tmp_path)))


class Planned(OneModel):
    """Returns the plan's optimizer where there is one."""

    def configure_optimizers(self):
        handle = getattr(self.model, "zgraph", None)
        optimizer = handle.optimizer if handle else torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


def planned(plan: dict[str, Any] | None, epochs: int, size: int, path: str, ckpt: str | None) -> Any:
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "max_epochs": epochs}
    return trained(
        Planned, plan, None, lambda trainer, _: trainer.save_checkpoint(path), ckpt, {"size": size}, **options
    )[0]


@pytest.mark.gloo
@pytest.mark.slow
def test_the_plans_optimizer_and_its_states_on_another_rank(two: Ranks, tmp_path):
    mine, plan = str(tmp_path / "mine"), {"optimizer": zgraph.AdamW(lr=1e-2)}
    expected = two.run(planned, None, 2, 2, str(tmp_path / "plain"), None)
    losses = [sum(v) / 2 for v in zip(*(seen["loss"] for seen in expected), strict=True)]
    first = two.run(planned, {**plan, "zero": 3}, 1, 2, mine, None)
    assert [sum(v) / 2 for v in zip(*(seen["loss"] for seen in first), strict=True)] == pytest.approx(
        losses[:6], rel=1e-5
    )
    rest = planned({**plan, "zero": 1}, 2, 4, mine, mine)
    assert rest["loss"] == pytest.approx(losses[6:], rel=1e-5)


class CompiledByItself(OneModel):
    def configure_model(self):
        if not hasattr(self.model, "zgraph"):
            zgraph.compile(self.model, zgraph.Plan(zero=3, backend="eager"))


def beside(kind: str, epochs: int, path: str, ckpt: str | None) -> Any:
    """A run of Lightning's ModelParallelStrategy on what the user has compiled, or of DDP."""
    with as_launched():
        mine = kind == "mine"
        strategy = ModelParallelStrategy(dist.get_world_size(), 1) if mine else "ddp"
        model = CompiledByItself() if mine else OneModel()
        trainer = trainer_of(strategy, accumulate_grad_batches=2, gradient_clip_val=0.3, max_epochs=epochs)
        trainer.fit(model, rows(OneModel), rows(OneModel, 8), ckpt_path=ckpt)
        trainer.save_checkpoint(path)
        return model.seen


@pytest.mark.gloo
@pytest.mark.slow
def test_model_parallel_strategy_trains_what_the_user_has_compiled(two: Ranks, tmp_path):
    expected = two.run(beside, "plain", 2, str(tmp_path / "plain"), None)
    mine = str(tmp_path / "mine")
    first, rest = two.run(beside, "mine", 1, mine, None), two.run(beside, "mine", 2, mine, mine)
    for plain, one, other in zip(expected, first, rest, strict=True):
        assert one["loss"] + other["loss"] == pytest.approx(plain["loss"], rel=1e-5)
        assert one["norm"] + other["norm"] == pytest.approx(plain["norm"], rel=1e-5)

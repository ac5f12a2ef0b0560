"""What a `ZGraphStrategy` can't do is refused by name before the first step, with the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning.pytorch")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities import grad_norm
from lightning_modules import OneModel, OwnLayers, TwoModels, as_launched, rows, trainer_of

import zgraph
from zgraph.errors import ModelError, PlanError, UnsupportedError, ZgraphError
from zgraph.lightning import ZGraphStrategy


@pytest.fixture(autouse=True)
def launched():
    with as_launched():
        yield


def refused(kind: type[ZgraphError], *said: str, model: Any = None, plan: Any = None, modules: Any = None, **options):
    """The error of fit, before a step."""
    model = OneModel() if model is None else model
    strategy = ZGraphStrategy(zgraph.Plan(backend="eager", **(plan or {})), modules=modules)
    with pytest.raises(kind) as caught:
        trainer_of(strategy, **options).fit(model, rows(OneModel, 4))
    assert type(caught.value) is kind and caught.value.hint, caught.value
    for part in said:
        assert part in str(caught.value), str(caught.value)
    assert not model.seen["norm"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"micro_batches": 2}, "accumulate_grad_batches"),
        ({"loss_average": "token"}, "what training_step returns"),
        ({"ema": 0.9, "optimizer": zgraph.AdamW()}, "average"),
        ({"elastic": zgraph.Elastic(batch=4, micro_batch=2)}, "batch_size"),
        ({"grad_clip": 1.0}, "no optimizer"),
        ({"precision": "fp16"}, "16-mixed"),
    ],
)
def test_a_plan_that_says_what_lightning_says(fields, said):
    refused(PlanError, said, plan=fields)


def test_precision_in_both_and_a_plugin_that_is_not_known():
    class Own(Precision):
        """Might do anything."""

    refused(PlanError, "'bf16-mixed'", "leave one of them out", plan={"precision": "bf16"}, precision="bf16-mixed")
    refused(PlanError, "Own can't be had", plugins=[Own()])
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    refused(PlanError, "scales the loss", plan={"optimizer": zgraph.AdamW()}, plugins=[scaled])


@pytest.mark.parametrize("callback", [EMAWeightAveraging(), StochasticWeightAveraging(1e-3)])
def test_callbacks_with_a_copy_of_the_model(callback):
    refused(PlanError, type(callback).__name__, "in place", callbacks=[callback])


def test_sync_batchnorm():
    refused(PlanError, "sync_batchnorm", "GroupNorm", sync_batchnorm=True)


def test_torch_compile_around_the_model_or_in_it():
    refused(ModelError, "torch.compile", model=torch.compile(OneModel()))
    model = OneModel()
    model.model = torch.compile(model.model)
    refused(ModelError, "wrapped already, in OptimizedModule", model=model)


def test_a_module_that_the_user_compiled():
    model = OneModel()
    zgraph.compile(model.model, zgraph.Plan(backend="eager"))
    refused(ModelError, "compiled already", "ModelParallelStrategy", model=model)


class Tied(OneModel):
    def make(self):
        self.down, self.up = nn.Linear(6, 6), nn.Linear(6, 6)
        self.up.weight = self.down.weight


@pytest.mark.parametrize(
    ("model", "modules", "said"),
    [
        (OwnLayers, None, "'scale' is in no module"),
        (Tied, None, "compiled apart"),
        (OneModel, "network", "no module 'network'"),
        (TwoModels, ["encoder"], "'heads.mean.scale' is in no module"),
        (OneModel, ["model", "model.0"], "inside of"),
        (OneModel, "self", "no forward"),
        (TwoModels, ["encoder", "heads"], "no forward"),
    ],
)
def test_modules_that_would_not_be_trained_by_the_plan(model, modules, said):
    refused(ModelError, said, model=model(), modules=modules)


class PastTheModel(OneModel):
    def loss(self, batch):
        return self.model[2](self.model[0](batch[0])).square().mean()


class BesideTheModel(OneModel):
    def make(self):
        super().make()
        self.free = torch.ones(3, requires_grad=True)

    def loss(self, batch):
        return (batch[1] * self.free).mean()


def test_a_step_that_does_not_call_what_is_compiled():
    for zero in (0, 3):
        refused(ModelError, "does not call the module", "modules=", model=PastTheModel(), plan={"zero": zero})
    refused(ModelError, "comes from none of the modules", "without the plan", model=BesideTheModel())


class Penalty(OneModel):
    def loss(self, batch):
        return super().loss(batch) + sum(p.square().sum() for p in self.parameters())


class OfWeightsAlone(OneModel):
    def loss(self, batch):
        return sum(p.square().sum() for p in self.parameters())


class PlainNorms(OneModel):
    def on_before_optimizer_step(self, optimizer):
        self.log_dict(grad_norm(self, 2))


def test_numbers_that_would_be_a_ranks_share():
    refused(UnsupportedError, "the loss has a term of the parameters", "full_tensor", model=Penalty())
    refused(ModelError, "the loss is a DTensor", "full_tensor", model=OfWeightsAlone())
    refused(ModelError, "plain tensor of values that are divided", "grad_norms", model=PlainNorms())


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 3)

    def forward(self, x):
        x.mul_(2)
        return self.inner(x)


class Slices(OneModel):
    def make(self):
        self.model = InPlace()

    def loss(self, batch):
        return self.model(batch[0][:, :5]).square().mean()


def test_a_module_that_writes_to_a_slice():
    refused(ModelError, "InPlace writes to an argument that is a slice", "contiguous", model=Slices())


class Optimizers(OneModel):
    def __init__(self, make):
        super().__init__()
        self.optimizer = make(self)

    def configure_optimizers(self):
        return self.optimizer(self) if callable(self.optimizer) else self.optimizer


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda model: torch.optim.SGD(model.parameters(), 0.1), ModelError, "not the model's as it is now"),
        (lambda model: lambda m: torch.optim.LBFGS(m.parameters()), PlanError, "LBFGS"),
    ],
)
def test_optimizers_that_shards_can_not_have(make, kind, said):
    refused(kind, said, model=Optimizers(make))


def test_two_optimizers_and_two_clippings():
    refused(PlanError, "configure_optimizers returns AdamW", plan={"optimizer": zgraph.AdamW()})
    refused(PlanError, "modules are compiled", model=TwoModels(), plan={"optimizer": zgraph.AdamW()})
    both = {"optimizer": zgraph.AdamW(), "grad_clip": 1.0}
    refused(PlanError, "both clip", plan=both, gradient_clip_val=1.0)


def test_another_plan_for_a_model_that_is_compiled():
    model = OneModel()
    trainer_of(ZGraphStrategy(zgraph.Plan(backend="eager"))).fit(model, rows(OneModel, 4))
    model.seen["norm"].clear()
    refused(ModelError, "another plan", model=model, plan={"zero": 1})


def test_an_argument_of_ddp():
    with pytest.raises(TypeError, match="find_unused_parameters"):
        ZGraphStrategy(find_unused_parameters=True)


def test_a_plan_is_read_from_its_file(tmp_path):
    (tmp_path / "plan.toml").write_text("zero = 2\n")
    assert ZGraphStrategy(tmp_path / "plan.toml").plan == zgraph.Plan(zero=2)
    with pytest.raises(PlanError, match=r"none\.toml"):
        ZGraphStrategy(tmp_path / "none.toml")


def test_the_strategy_has_its_name():
    assert isinstance(trainer_of("zgraph").strategy, ZGraphStrategy)
    assert isinstance(pl.Trainer(accelerator="cpu", strategy=ZGraphStrategy(), logger=False).strategy, ZGraphStrategy)

"""An optimizer's record has torch's arguments and defaults, refuses what means nothing, and is a value."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import tomllib

import pytest
import torch

from zgraph.errors import PlanError
from zgraph.plan.optimizers import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    AdamW8bit,
    AnyOptimizer,
    Lion,
    Muon,
    OneBitAdam,
    OneBitLAMB,
    Optimizer,
    ParamGroup,
    ZeroOneAdam,
)
from zgraph.record import Record

pytestmark = pytest.mark.core

ALL = (Adam, AdamW, AdamW8bit, SGD, Adagrad, Lion, LAMB, Muon, OneBitAdam, OneBitLAMB, ZeroOneAdam)


class Owner(Record, frozen=True):
    """A record that has an optimizer, as a plan."""

    optimizer: AnyOptimizer | None = None


def refused(make) -> PlanError:
    with pytest.raises(PlanError) as caught:
        make()
    return caught.value


@pytest.mark.parametrize("record", [Adam, AdamW, SGD, Adagrad, Muon], ids=lambda r: r.__name__)
def test_arguments_and_defaults_are_torchs(record):
    if not hasattr(torch.optim, record.__name__):
        pytest.skip("this torch has no such optimizer")
    theirs = inspect.signature(getattr(torch.optim, record.__name__)).parameters
    ways_to_run = {"params", "foreach", "fused", "capturable", "differentiable"}
    ours = record.model_fields.keys() - Optimizer.model_fields.keys() | {"lr", "weight_decay"}
    assert ours - {"companion", "companion_modules"} == theirs.keys() - ways_to_run
    for name in ours & theirs.keys():
        assert getattr(record(), name) == theirs[name].default, name


def test_lamb_and_lion_have_their_papers_defaults():
    lamb, lion = LAMB(), Lion()
    assert (lamb.lr, lamb.betas, lamb.eps, lamb.weight_decay) == (1e-3, (0.9, 0.999), 1e-6, 0.0)
    assert (lamb.max_coeff, lamb.min_coeff, lamb.bias_correction) == (10.0, 0.01, True)
    assert (lion.lr, lion.betas, lion.weight_decay) == (1e-4, (0.9, 0.99), 0.0)


def test_eight_bit_adamw_has_adamws_arguments_and_defaults():
    ours = AdamW8bit()
    for name in AdamW.model_fields.keys() - {"name"}:
        assert getattr(ours, name) == getattr(AdamW(), name), name
    assert ours.block_size == 256


@pytest.mark.parametrize(
    ("record", "values", "where"),
    [
        (Adam, {"lr": -1e-3}, "lr"),
        (Adam, {"lr": float("nan")}, "lr"),
        (AdamW, {"betas": (0.9, 1.0)}, "betas[1]"),
        (AdamW, {"betas": (-0.1, 0.9)}, "betas[0]"),
        (AdamW, {"betas": (0.9,)}, "betas[1]"),
        (Adam, {"eps": -1e-8}, "eps"),
        (Adam, {"amsgrad": 1}, "amsgrad"),
        (SGD, {"momentum": -0.5}, "momentum"),
        (SGD, {"weight_decay": -1}, "weight_decay"),
        (SGD, {"nesterov": True}, "nesterov"),
        (SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov"),
        (Adagrad, {"lr_decay": -1}, "lr_decay"),
        (Adagrad, {"initial_accumulator_value": -1}, "initial_accumulator_value"),
        (LAMB, {"min_coeff": -1}, "min_coeff"),
        (LAMB, {"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff"),
        (LAMB, {"eps": 0}, "eps"),
        (Muon, {"ns_steps": 100}, "ns_steps"),
        (Muon, {"adjust_lr_fn": "largest"}, "adjust_lr_fn"),
        (Muon, {"companion": {"lr": -1}}, "companion.lr"),
        (Muon, {"companion": AdamW(groups=(ParamGroup(match="*", lr=1),))}, "companion.groups"),
        (AdamW8bit, {"block_size": 0}, "block_size"),
        (Lion, {"decay": "none"}, "decay"),
    ],
)
def test_values_that_mean_nothing_are_refused(record, values, where):
    assert refused(lambda: record(**values)).where == where


def test_an_unknown_argument_is_refused_with_the_nearest():
    error = refused(lambda: AdamW(weigth_decay=0.1))
    assert error.where == "weigth_decay" and error.hint == "did you mean 'weight_decay'?"


@pytest.mark.parametrize(
    ("name", "hint"),
    [("adamw", "did you mean 'AdamW'?"), ("Adma", "did you mean 'Adam'?"), (["Adam"], None), (3, None)],
)
def test_an_unknown_name_is_refused_with_the_nearest(name, hint):
    error = refused(lambda: Owner.model_validate({"optimizer": {"name": name}}))
    assert error.where == "optimizer.name"
    assert hint is None or error.hint == hint


def test_a_table_without_a_name_is_refused_with_all_names():
    error = refused(lambda: Owner.model_validate({"optimizer": {"lr": 1e-3}}))
    assert error.where == "optimizer.name" and all(record.__name__ in str(error.hint) for record in ALL)


def test_faults_inside_a_table_say_where():
    assert refused(lambda: Owner.model_validate({"optimizer": {"name": "SGD", "lr": -1}})).where == "optimizer.lr"
    inner = {"optimizer": {"name": "SGD", "groups": [{"match": "*", "betas": [0, 0]}]}}
    assert refused(lambda: Owner.model_validate(inner)).where == "optimizer.groups[0].betas"


def test_toml_makes_the_record():
    text = """
    [optimizer]
    name = "AdamW"
    lr = 3e-4
    betas = [0.9, 0.95]
    decay = "matrices"
    [[optimizer.groups]]
    match = ["*.bias", "norm*"]
    weight_decay = 0
    """
    expected = AdamW(
        lr=3e-4,
        betas=(0.9, 0.95),
        decay="matrices",
        groups=(ParamGroup(match=("*.bias", "norm*"), weight_decay=0.0),),
    )
    assert Owner.model_validate(tomllib.loads(text)).optimizer == expected


# -- groups -------------------------------------------------------------------------------------------------------------
def test_a_group_takes_overrides_as_arguments():
    group = ParamGroup(match="*.bias", weight_decay=0.0, betas=[0.8, 0.9])
    assert group.overrides == {"weight_decay": 0.0, "betas": (0.8, 0.9)}
    assert group == ParamGroup(match="*.bias", overrides={"weight_decay": 0, "betas": (0.8, 0.9)})


def test_a_groups_unknown_key_is_refused_with_the_nearest():
    error = refused(lambda: AdamW(groups=(ParamGroup(match="*", weightdecay=0.0),)))
    assert error.where == "groups[0].weightdecay" and error.hint == "did you mean 'weight_decay'?"
    assert refused(lambda: AdamW(groups=(ParamGroup(match="*", momentum=0.9),))).where == "groups[0].momentum"
    assert refused(lambda: AdamW(groups=(ParamGroup(match="*", name="SGD"),))).where == "groups[0].name"


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        ({"lr": -1.0}, "groups[1].lr"),
        ({"lr": "high"}, "groups[1].lr"),
        ({"betas": (0.9, 2.0)}, "groups[1].betas[1]"),
        ({"nesterov": True}, "groups[1].nesterov"),
    ],
)
def test_a_groups_value_that_means_nothing_is_refused(overrides, where):
    record = SGD if "nesterov" in overrides else Adam
    error = refused(lambda: record(groups=(ParamGroup(match="a"), ParamGroup(match="b", **overrides))))
    assert error.where == where


def test_every_fault_of_groups_is_told():
    error = refused(lambda: Adam(groups=(ParamGroup(match="a", lr=-1), ParamGroup(match="b", epsilon=1))))
    assert [problem.where for problem in error.problems] == ["groups[0].lr", "groups[1].epsilon"]


def test_a_group_of_muons_may_speak_to_the_companion():
    Muon(groups=(ParamGroup(match="embed.*", betas=(0.8, 0.9)), ParamGroup(match="head.*", momentum=0.8, ns_steps=6)))
    error = refused(lambda: Muon(groups=(ParamGroup(match="*", betas=(0.8, 2)),)))
    assert error.where == "groups[0].betas[1]"


# -- values -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("record", ALL, ids=lambda r: r.__name__)
def test_a_record_survives_json(record):
    first = record(lr=2, groups=(ParamGroup(match=("a", "b*"), lr=0.5), ParamGroup(match="c", weight_decay=1)))
    dumped = json.loads(json.dumps(Owner(optimizer=first).model_dump(mode="json")))
    assert Owner.model_validate(dumped).optimizer == first
    assert record.model_validate(first.model_dump(mode="json")) == first
    assert next(iter(dumped["optimizer"])) == "name"


@pytest.mark.parametrize("record", ALL, ids=lambda r: r.__name__)
def test_records_are_hashable_and_comparable(record):
    groups = (ParamGroup(match="a", lr=1, weight_decay=0.0),)
    same = (ParamGroup(match="a", weight_decay=0, lr=1.0),)
    assert record(lr=1, groups=groups) == record(lr=1.0, groups=same)
    assert hash(record(lr=1, groups=groups)) == hash(record(lr=1.0, groups=same))
    assert record(lr=1) != record(lr=2)
    assert len({record(), record(), record(lr=7)}) == 2


def test_records_need_no_torch():
    code = "import sys, zgraph.plan.optimizers; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

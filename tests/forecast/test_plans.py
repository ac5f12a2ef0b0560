"""Plans are compared on the same batch, by what their steps take, and the best that fits is found and written."""

from __future__ import annotations

import json

import pytest
import torch
from sweeps import sweep
from torch import nn
from typer.testing import CliRunner

import zgraph
from zgraph.cli.app import app
from zgraph.inspection.compare_plans import evaluate, limit_of, search
from zgraph.inspection.make_inspection import of_model
from zgraph.inspection.memory import peak_of

PLAN = zgraph.Plan(mesh={"dp": -1}, backend="eager", optimizer=zgraph.AdamW(lr=1e-3), hardware="h100-80g")


class Net(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def net(layers: int = 4):
    with torch.device("meta"):
        return Net(layers)


INPUTS = (torch.zeros(8, 512),)


def factory():
    return net(), INPUTS


def one_layer():
    return net(1), INPUTS


def test_an_evaluation_is_the_forecast_of_the_plan():
    found = evaluate(net(), INPUTS, PLAN, 4, "plain")
    live = of_model(net(), PLAN, INPUTS, 4)
    assert found.seconds == pytest.approx(live.forecast.seconds)
    assert found.exposed == pytest.approx(live.forecast.exposed)
    assert found.peak == peak_of(live).bytes


@sweep("zero", [0, 1, 2, 3], quick=2)
def test_micro_batches_share_the_batch_and_only_the_last_reduces_where_a_stage_lets_it(zero):
    plan = PLAN.model_copy(update={"zero": zero, "micro_batches": 4})
    one, four = (evaluate(net(), INPUTS, p, 4, "") for p in (plan.model_copy(update={"micro_batches": 1}), plan))
    assert four.seconds > one.seconds  # (data-sheet rates: smaller products, the same weights read four times)
    if zero == 3:
        assert four.seconds < 4 * one.seconds


def test_what_is_wrong_with_a_plan_is_its_problem():
    found = evaluate(*one_layer(), PLAN.model_copy(update={"memory_budget": 1000}), 4, "tiny")
    assert not found.possible and "does not fit" in found.problem and not found.fits
    assert json.loads(json.dumps(found.to_json()))["seconds"] is None


@pytest.mark.slow
def test_the_search_finds_the_fastest_that_fits_and_sharding_where_nothing_else_does():
    told = []
    wide, whole = search(net(), INPUTS, PLAN, 4, limit_of(PLAN), told.append)
    assert whole and len(told) == len(wide) == 16 and wide[0].fits
    assert wide[0].seconds == min(e.seconds for e in wide if e.possible)
    limit = min(e.peak for e in wide if e.plan.zero < 3) * 6 // 10
    narrow, _ = search(net(), INPUTS, PLAN, 4, limit)
    assert narrow[0].plan.zero == 3 and narrow[0].peak <= limit
    assert not any(e.fits for e in narrow if e.plan.zero == 0)


@pytest.mark.slow
def test_one_rank_has_nothing_to_shard():
    assert {e.plan.zero for e in search(net(), INPUTS, PLAN, 1, limit_of(PLAN))[0]} == {3}


@pytest.fixture
def here(tmp_path, monkeypatch):
    from pathlib import Path

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "support"))
    return tmp_path


def test_the_command_compares_plans_and_writes_the_best(here):
    PLAN.save(here / "three.toml")
    PLAN.model_copy(update={"zero": 0}).save(here / "none.toml")
    args = [
        "plan",
        "test_plans:factory",
        "--plan",
        "three.toml",
        "--plan",
        "none.toml",
        "--world",
        "8",
        "--budget",
        "10MiB",
    ]
    done = CliRunner().invoke(app, [*args, "-o", "best.toml"])
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[1][0] == "three.toml" and "yes" in rows[1] and rows[2][0] == "none.toml" and "no" in rows[2]
    assert zgraph.Plan.load(here / "best.toml") == PLAN
    made = json.loads(CliRunner().invoke(app, [*args, "--json"]).stdout)
    assert made["best"] == "three.toml" and {e["limit"] for e in made["plans"]} == {10 * 2**20}


def test_no_plan_that_fits_is_a_failed_check(here):
    done = CliRunner().invoke(
        app, ["plan", "test_plans:factory", "--world", "2", "--budget", "1MiB", "-o", "best.toml"]
    )
    assert done.exit_code == 1 and "none fits" in done.stdout and not (here / "best.toml").exists()


@pytest.mark.parametrize("budget", ["much", "0", "-3GiB"])
def test_a_budget_that_is_no_size_is_usage(here, budget):
    done = CliRunner().invoke(app, ["plan", "test_plans:factory", "--budget", budget])
    assert done.exit_code == 2 and "no size" in done.stderr


@pytest.mark.slow
def test_each_plan_has_its_own_limit_in_whatever_order_they_are_given(here):
    PLAN.save(here / "free.toml")
    PLAN.model_copy(update={"memory_budget": 1000}).save(here / "tight.toml")
    for order in (("free", "tight"), ("tight", "free")):
        plans = [word for name in order for word in ("--plan", f"{name}.toml")]
        made = json.loads(CliRunner().invoke(app, ["plan", "test_plans:one_layer", *plans, "--json"]).stdout)
        assert made["best"] == "free.toml" and [e["fits"] for e in made["plans"]] == [True, False]


def test_plans_for_different_worlds_are_compared_for_one_that_is_named(here):
    PLAN.save(here / "two.toml")
    PLAN.model_copy(update={"mesh": {"replicate": 2, "dp": 4}}).save(here / "eight.toml")
    args = ["plan", "test_plans:factory", "--plan", "two.toml", "--plan", "eight.toml"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 2 and "different numbers of ranks" in done.stderr
    assert CliRunner().invoke(app, [*args, "--world", "8"]).exit_code == 0


def test_a_batch_that_micro_batches_do_not_divide_is_a_plan_s_problem():
    found = evaluate(net(), (torch.zeros(7, 512),), PLAN.model_copy(update={"micro_batches": 8}), 2, "eight")
    assert not found.possible and "do not divide" in found.problem


@sweep("zero", [0, 1, 2, 3], quick=(1, 3))
def test_every_command_speaks_of_the_same_step_of_several_micro_batches(zero):
    """A step has a program for the first micro-batch, one for those that follow, and where it adds up gradients one for the last."""
    plan = PLAN.model_copy(update={"zero": zero, "micro_batches": 4})
    live = of_model(net(), plan, INPUTS, 4)
    steps = [way for way in live.step_ways() if way.kind != "update"]
    assert [way.runs for way in steps] == ([1, 2, 1] if zero < 2 else [1, 3])
    assert live.forecast.seconds == pytest.approx(evaluate(net(), INPUTS, plan, 4, "").seconds)
    reduces = [sum("reduce" in row["target"] for row in way.last.data["nodes"]) > 0 for way in steps]
    assert reduces == ([False, False, True] if zero < 2 else [True, True])

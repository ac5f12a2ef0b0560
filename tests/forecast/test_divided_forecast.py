"""Programs whose weights ranks divide are simulated, counted and shown for any number of ranks, without any."""

from __future__ import annotations

import json

import pytest
import torch
from golden_models import Llama
from typer.testing import CliRunner

from zgraph import AdamW, Plan
from zgraph.build.pass_pipeline import costs_of
from zgraph.build.planned_step import captured_program, update_program
from zgraph.build.what_if import step_by
from zgraph.cli.app import app
from zgraph.cli.dump import rank_place
from zgraph.errors import PlanError
from zgraph.forecast.make_symbolic_forecast import symbolic_forecast
from zgraph.forecast.stages import forecast_pipeline
from zgraph.inspection import bundle
from zgraph.inspection.compare_plans import evaluate
from zgraph.inspection.explain import explain
from zgraph.inspection.make_inspection import of_model
from zgraph.inspection.memory import peak_of
from zgraph.inspection.page.parameters import parameters_of
from zgraph.program import collectives
from zgraph.program.node import info
from zgraph.program.program import Division

WEIGHT, NORM = "layers.0.up_proj.weight", "layers.0.input_layernorm.weight"
DIM, WORDS = 64, 96


def plan_of(**more) -> Plan:
    base = {"mesh": {"dp": 2, "tp": 2}, "backend": "eager", "zero": 1, "optimizer": AdamW(lr=1e-3)}
    return Plan(**base | {"hardware": "h100-80g"} | more)


def llama(layers: int = 1):
    """Parameters take nearly all of its memory."""
    with torch.device("meta"):
        return Llama(layers, DIM, WORDS), (torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int64))


def inspected(layers: int = 1, **more):
    model, inputs = llama(layers)
    plan = plan_of(**more)
    return of_model(model, plan, inputs, plan.usual_world())


@pytest.fixture(scope="module")
def found():
    return inspected()


@pytest.mark.slow
def test_a_program_counts_a_rank_s_part_of_weights_and_gradients(found):
    spec = found.way().last.program.params[WEIGHT]
    assert spec.division == Division("tp", 2, 0) and spec.whole_shape == (3 * DIM, DIM)
    assert spec.shape == (3 * DIM // 2, DIM) and spec.shard_shape == (3 * DIM // 4, DIM)
    rows = {row["name"]: row for row in parameters_of(found.way().last.program, found.update.last.program)}
    part = 3 * DIM * DIM // 4 * 4
    assert (rows[WEIGHT]["bytes"], rows[WEIGHT]["gradient"], rows[WEIGHT]["states"]) == (part, part, 2 * part)
    assert rows[WEIGHT]["shape"] == [3 * DIM, DIM] and rows[WEIGHT]["elements"] == 3 * DIM * DIM
    assert rows[WEIGHT]["layout"] == "Shard(0) over tp, Shard(0) over dp"
    assert rows["layers.0.down_proj.weight"]["layout"] == "Shard(1) over tp, Shard(0) over dp"
    assert rows[NORM]["layout"] == "Shard(0) over dp"


@pytest.mark.slow
def test_weights_that_are_only_divided_are_never_whole():
    found = inspected(mesh={"tp": 2})
    rows = {row["name"]: row for row in parameters_of(found.way().last.program, found.update.last.program)}
    assert (rows[WEIGHT]["layout"], rows[WEIGHT]["between"]) == ("Shard(0) over tp", "always in parts")
    assert (rows[NORM]["layout"], rows[NORM]["between"]) == ("whole", "always whole")


@pytest.mark.slow
def test_more_ranks_that_divide_hold_less():
    one, two, four = (inspected(mesh={"dp": 1, "tp": ranks}).way() for ranks in (1, 2, 4))
    norms = sum(2 * s.nbytes for s in one.last.program.params.values() if "norm" in s.name)
    weights = [sum(s.rank_bytes for s in way.last.program.params.values()) - norms for way in (one, two, four)]
    states = [way.held - norms for way in (one, two, four)]  # (AdamW has two, as there are a weight and its gradient)
    for whole, half, quarter in (weights, states):
        assert whole == 2 * half == 4 * quarter


@pytest.mark.slow
def test_its_collectives_have_a_stream_of_their_own(found):
    starts = [n for n in found.way().last.program.graph.nodes if collectives.is_start(n)]
    assert {(info(n).mesh_dim, info(n).stream) for n in starts} == {("tp", "comm:tp"), ("dp", "comm:dp")}


def test_explain_says_how_a_weight_is_divided(found):
    said = str(explain(found, WEIGHT))
    assert f"float32[{3 * DIM}, {DIM}] is divided along dimension 0 among the 2 ranks of 'tp'" in said
    assert "why: tensor_parallel = 'auto'" in said
    assert f"its part, float32[{3 * DIM // 2}, {DIM}] is sharded on dimension 0 over 2 ranks of 'dp'" in said
    assert "divided" not in str(explain(found, NORM))


def test_a_bundle_says_the_same(found, tmp_path):
    bundle.write(found, tmp_path / "step")
    read = bundle.read(tmp_path / "step")
    assert str(explain(read, WEIGHT)) == str(explain(found, WEIGHT))
    assert read.way().last.program.params == found.way().last.program.params


def test_a_rank_s_place_has_its_parts(found):
    place = rank_place(found.way().last.program, 3, WEIGHT)
    assert place["coordinates"] == {"dp": 1, "tp": 1}
    assert place["parts"] == {WEIGHT: {"dim": 0, "part": 1, "of": 2}}
    assert place["rows"] == {WEIGHT: [3 * DIM // 4, 3 * DIM // 2]}  # (of the part)


def test_another_plan_of_a_captured_program_keeps_its_divisions(found):
    plan = plan_of()
    model, inputs = llama()
    captured = captured_program(model, plan, inputs, 4)
    taken = step_by(plan, model, captured, costs_of(plan), torch.device("cpu"))
    assert taken.peak == peak_of(found).bytes and taken.seconds == pytest.approx(found.forecast.seconds)


@pytest.mark.slow
def test_a_pipeline_of_divided_stages_is_forecast_for_a_thousand_ranks():
    model, inputs = llama(4)
    inputs = tuple(x.repeat(4, 1) for x in inputs)  # (a micro-batch of one row)
    base = {"schedule": "1f1b", "micro_batches": 8, "partition": [f"layers.{i}" for i in (1, 2, 3)]}
    plan = plan_of(mesh={"pp": 4, "replicate": 32, "dp": 2, "tp": 4}, **base)
    found = forecast_pipeline(model, plan, inputs, 1024)
    undivided = forecast_pipeline(model, plan_of(mesh={"pp": 4, "replicate": 32, "dp": 2}, **base), inputs, 256)
    assert [s.stage for s in found.stages] == list(range(4)) and len({s.like for s in found.stages}) < 4
    assert sum(s.parameters for s in found.stages) < sum(s.parameters for s in undivided.stages) / 3
    for kind in ("parameters", "states", "gradients"):
        for rank, alone in zip(found.ranks, undivided.ranks, strict=True):
            assert rank.categories[kind] < alone.categories[kind] / 3
    assert all(rank.exposed > alone.exposed for rank, alone in zip(found.ranks, undivided.ranks, strict=True))
    chosen = evaluate(model, inputs, plan, 1024, "divided")
    assert (chosen.seconds, chosen.peak) == (found.seconds, found.worst.peak)


@pytest.mark.slow
def test_the_command_forecasts_it(tmp_path):
    file = tmp_path / "plan.json"
    plan_of(mesh={"pp": 2, "dp": -1, "tp": 2}).save(file)
    target = "golden_models:small_llama"
    for command in (["check"], ["dump", "--stage", "0", "--rank", "3"], ["memory", "--stage", "1"]):
        done = CliRunner().invoke(app, [command[0], target, "--plan", str(file), "--world", "8", *command[1:]])
        assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["forecast", target, "--plan", str(file), "--world", "8", "--json"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["world"] == 8 and len(data["ranks"]) == 2 and data["exposed"] > 0


def test_what_needs_the_whole_model_is_refused():
    model, inputs = llama()
    with pytest.raises(PlanError, match="whose ranks compute parts of a layer has no forecast by formulas"):
        symbolic_forecast(model, plan_of(), inputs)
    with pytest.raises(PlanError, match="the update of weights that ranks divide can't be built alone"):
        update_program(model, plan_of(), 4)

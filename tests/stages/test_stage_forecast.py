"""What a pipeline takes is known before it runs: time, bubble, the memory of each rank; the command line shows it, or says that it can't."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from cli_targets import Chain
from golden_models import Llama
from typer.testing import CliRunner

from zgraph import AdamW
from zgraph.build.planned_step import planned_step, programs
from zgraph.cli.app import app
from zgraph.errors import PlanError
from zgraph.forecast.make_symbolic_forecast import symbolic_forecast
from zgraph.forecast.pipeline_plan import planned_stages
from zgraph.forecast.stages import PipelineForecast, forecast_of, forecast_pipeline, micro_batch
from zgraph.inspection.compare_plans import evaluate
from zgraph.inspection.make_inspection import of_stage
from zgraph.inspection.memory import peak_of
from zgraph.passes.analysis.simulator import simulate
from zgraph.plan.pipeline_schedules.actions import Kind
from zgraph.plan.plan import Plan
from zgraph.program.program import OutputRole
from zgraph.stages.simulated_stage import likeness

HERE = Path(__file__).parents[1] / "support"


def chain(layers: int, dim: int = 256, rows: int = 4096):
    """Equal layers that are all products: a machine's latency is nothing beside them."""
    with torch.device("meta"):
        return Chain(layers, dim), (torch.zeros(rows, dim),)


def plan_of(ranks: int, micro_batches: int, **more) -> Plan:
    mesh = {"pp": ranks, **more.pop("mesh", {})}
    base = {"backend": "eager", "zero": 0, "hardware": "h100-80g", "partition": "uniform"}
    return Plan(mesh=mesh, micro_batches=micro_batches, **base | more)


def forecast(plan: Plan, model, inputs) -> PipelineForecast:
    return forecast_pipeline(model, plan, inputs, plan.usual_world())


# The step's time.


@pytest.mark.core
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8)])
def test_the_bubble_of_equal_stages_is_that_of_1f1b(ranks, micro_batches):
    found = forecast(plan_of(ranks, micro_batches), *chain(8, dim=8192, rows=1024 * micro_batches))
    expected = (ranks - 1) / (micro_batches + ranks - 1)
    assert found.timeline.bubble == pytest.approx(expected, rel=0.05)
    assert found.seconds == found.timeline.makespan and not found.update  # (no optimizer)


def test_a_zero_bubble_schedule_has_a_smaller_bubble_and_a_shorter_step():
    model, inputs = chain(8, dim=8192, rows=8192)
    plain, zero = (forecast(plan_of(4, 8, schedule=name), model, inputs) for name in ("1f1b", "zb"))
    assert zero.timeline.bubble < plain.timeline.bubble and zero.seconds < plain.seconds
    stage = zero.stages[1]
    assert stage.backward == stage.input_gradients + stage.weight_gradients
    assert stage.weight_gradients > 0 and plain.stages[1].weight_gradients is None
    assert zero.stages[0].input_gradients == 0  # (nobody waits for them)


def test_the_step_is_the_pipeline_and_the_slowest_update():
    found = forecast(plan_of(2, 2, optimizer=AdamW(lr=1e-3)), *chain(4))
    assert found.update == max(rank.update for rank in found.ranks) > 0
    assert found.seconds == found.timeline.makespan + found.update


def test_a_stage_takes_what_its_program_does_in_the_simulator():
    model, inputs = chain(4)
    plan = plan_of(2, 2)
    made = planned_stages(model, plan, micro_batch(plan, inputs), 2)
    found = forecast_of(made)
    for stage, step in zip(found.stages, made.steps, strict=True):
        assert stage.forward + stage.backward == pytest.approx(simulate(step.history().program, made.costs).seconds)


def test_what_is_sent_is_what_crosses_the_cuts():
    found = forecast(plan_of(2, 4), *chain(4, dim=256, rows=4096))
    crossing = 4096 // 4 * 256 * 4  # bytes of a micro-batch's activation
    assert [(s.source, s.target, s.back, s.values, s.bytes) for s in found.sent] == [
        (0, 1, False, 1, crossing),
        (1, 0, True, 1, crossing),
    ]
    assert all(s.seconds > s.bytes / 450e9 for s in found.sent)  # (the data sheet's link, and its latency)


def test_slower_links_make_the_step_longer():
    model, inputs = chain(4)
    fast, slow = (forecast(plan_of(2, 4, hardware=name), model, inputs) for name in ("h100-80g", "a100-80g"))
    assert slow.sent[0].seconds > fast.sent[0].seconds


def test_stages_of_one_rank_send_each_other_nothing_over_a_link():
    found = forecast(plan_of(2, 2, schedule="zbv"), *chain(4))
    assert found.timeline.schedule.rank_of == (0, 1, 1, 0)
    assert {(s.source, s.target) for s in found.sent} == {(0, 1), (1, 0), (2, 3), (3, 2)}


def test_equal_stages_are_simulated_once_and_unequal_ones_are_not():
    found = forecast(plan_of(8, 8), *chain(8))
    # The first stage gives no gradient back, the last one gives the loss; all between are alike.
    assert [stage.like for stage in found.stages] == [0, 1, 1, 1, 1, 1, 1, 7]
    assert len({stage.forward for stage in found.stages[1:7]}) == 1


def test_stages_differ_if_something_goes_by_the_names_of_modules():
    model, inputs = chain(4)
    alike = planned_stages(model, plan := plan_of(4, 4), micro_batch(plan, inputs), 4).steps
    named = planned_stages(model, plan := plan_of(4, 4, recompute=("layers.1",)), micro_batch(plan, inputs), 4).steps
    assert likeness(alike[1]) == likeness(alike[2]) and likeness(named[1]) != likeness(named[2])


@pytest.mark.parametrize("zero", [1, 2])
def test_the_first_forward_alone_gathers_where_weights_are_kept(zero):
    plan = plan_of(2, 4, mesh={"dp": 4}, zero=zero, optimizer=AdamW(lr=1e-3), prefetch={"enabled": False})
    found = forecast(plan, *chain(4, rows=64))
    for row in found.timeline.spans:
        seconds = [span.end - span.begin for span in row if span.action.kind is Kind.F]
        assert seconds[0] > seconds[1] == pytest.approx(seconds[-1])


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_forward_s_first_gathers_are_made_while_its_rank_waits_for_what_it_receives(zero):
    fields = {"mesh": {"dp": 4}, "zero": zero, "optimizer": AdamW(lr=1e-3)}
    early, late = (
        forecast(plan_of(2, 4, **fields, prefetch={"enabled": enabled}), *chain(4, rows=64))
        for enabled in (True, False)
    )

    def first(found, rank):
        span = found.timeline.spans[rank][0]
        return span.end - span.begin

    assert first(early, 1) < first(late, 1)
    assert early.timeline.makespan < late.timeline.makespan


def test_the_last_backward_alone_reduces_below_stage_2():
    model, inputs = chain(4, rows=64)
    for zero, once in ((1, True), (2, False)):
        found = forecast(plan_of(2, 4, mesh={"dp": 4}, zero=zero), model, inputs)
        seconds = [span.end - span.begin for span in found.timeline.spans[0] if span.action.kind is Kind.B]
        assert (seconds[-1] > 1.01 * seconds[0]) is once


# Memory.


def test_each_rank_takes_less_on_more_stages():
    model, inputs = chain(8, dim=1024, rows=1024)
    peaks = [forecast(plan_of(ranks, 8, optimizer=AdamW(lr=1e-3)), model, inputs).worst.peak for ranks in (2, 4, 8)]
    assert peaks[0] > peaks[1] > peaks[2]


def test_a_ranks_memory_is_that_of_its_own_parameters_and_their_states():
    found = forecast(plan_of(4, 4, optimizer=AdamW(lr=1e-3)), *chain(8, dim=256, rows=64))
    layers = 2 * 256 * 256 * 4  # bytes of two
    for rank in found.ranks:
        weights = layers + (256 * 4 if rank.rank == 0 else 0)  # (what the first one adds)
        assert rank.categories["parameters"] == weights
        assert 2 * weights <= rank.categories["states"] <= 2 * weights + 64  # (and counts of steps)
        assert rank.categories["gradients"] >= weights


def test_the_first_rank_of_1f1b_has_most_in_flight_and_the_last_has_none():
    found = forecast(plan_of(4, 8), *chain(8))
    held = [rank.categories.get("in flight", 0) for rank in found.ranks]
    assert held[0] == 3 * found.stages[0].saved and held == sorted(held, reverse=True) and held[-1] == 0


def test_gpipe_takes_more_than_1f1b_and_more_with_each_micro_batch():
    model, inputs = chain(8)
    peaks = {
        (name, count): forecast(plan_of(4, count, schedule=name), model, inputs).worst.peak / (4096 // count)
        for name in ("gpipe", "1f1b")
        for count in (4, 16)
    }
    assert peaks["gpipe", 16] > peaks["1f1b", 16] and peaks["gpipe", 16] > peaks["gpipe", 4]


def test_a_stages_own_memory_says_what_the_pipelines_says_of_its_rank():
    model, inputs = chain(4)
    plan = plan_of(2, 4, optimizer=AdamW(lr=1e-3))
    whole = forecast(plan, model, inputs)
    for rank in whole.ranks:
        alone = of_stage(model, plan, inputs, 2, rank.stages[0])
        assert peak_of(alone).bytes >= rank.peak  # (it has the most in flight beside the most of the program)
        assert peak_of(alone).bytes < 1.5 * rank.peak
        assert [way.kind for way in alone.ways.values()] == ["step", "step", "update"]


# What is made.


def test_a_stages_programs_are_for_the_ranks_of_one_stage():
    model, inputs = chain(4)
    plan = plan_of(2, 2, mesh={"dp": 4}, zero=3)
    made = planned_stages(model, plan, micro_batch(plan, inputs), 8)
    for step, own in zip(made.steps, (3, 2), strict=True):
        program = step.history().program
        assert program.mesh == {"dp": 4}
        assert Counter(p.role for p in program.outputs)[OutputRole.GRADIENT] == own


def test_the_forecast_is_plain_data_as_well():
    found = forecast(plan_of(2, 2, schedule="zb", optimizer=AdamW(lr=1e-3)), *chain(4))
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["peak"] == found.worst.peak == max(rank["peak"] for rank in data["ranks"])
    assert data["seconds"] == found.seconds and data["schedule"]["rows"][0][0] == "0F0"
    assert sum(data["ranks"][0]["categories"].values()) == data["ranks"][0]["peak"]


def test_its_text_has_the_cut_the_schedule_and_the_memory():
    text = str(forecast(plan_of(2, 4), *chain(4)))
    for part in ("2 stages, cut by uniform", "layers.2 .. layers.3", "rank 0 |0", "bubble", "in flight", "peak:"):
        assert part in text, text


# What can't be.


def test_what_is_of_one_program_is_refused_for_a_plan_with_a_pipeline():
    model, inputs = chain(4)
    plan = plan_of(2, 2)
    for look in (
        lambda: programs(model, plan, inputs, 2),
        lambda: planned_step(model, plan, inputs, 2),
        lambda: symbolic_forecast(model, plan, inputs),
    ):
        with pytest.raises(PlanError, match="pipeline"):
            look()
    with pytest.raises(PlanError, match="no pipeline"):
        planned_stages(model, Plan(mesh={"pp": 1, "dp": 2}), inputs, 2)


def test_plans_are_compared_with_those_that_have_pipelines():
    model, inputs = chain(4)
    staged = evaluate(model, inputs, plan_of(2, 4), 2, "staged")
    plain = evaluate(
        model, inputs, Plan(mesh={"dp": 2}, micro_batches=4, backend="eager", hardware="h100-80g"), 2, "dp"
    )
    assert 0 < staged.bubble < 1 and plain.bubble is None and staged.possible and plain.possible
    assert "bubble" in staged.to_json() and "bubble" not in plain.to_json()
    many = evaluate(model, inputs, plan_of(16, 4), 16, "too many")
    assert not many.possible and "16 stages" in many.problem


# The command line.


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """A plan's file with a pipeline; targets are named from here."""
    monkeypatch.chdir(HERE)
    monkeypatch.syspath_prepend(str(HERE))

    def write(text: str = "", mesh: str = "pp = 2, dp = 2", micro_batches: int = 4) -> Path:
        path = tmp_path / "plan.toml"
        base = 'backend = "eager"\npartition = "uniform"\noptimizer = {name = "AdamW", lr = 1e-3}\n'
        path.write_text(f"mesh = {{ {mesh} }}\nmicro_batches = {micro_batches}\n{base}{text}\n")
        return path

    return write


TARGET = "cli_targets:chain"


def zgraph(*args: object, code: int = 0):
    done = CliRunner().invoke(app, [str(a) for a in args])
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return done


def refused(*args: object) -> str:
    done = zgraph(*args, code=2)
    assert not done.stdout
    return done.stderr


def test_forecast_shows_the_whole_pipeline(plan):
    text = zgraph("forecast", TARGET, "--plan", plan()).stdout
    assert text.startswith("4 rank(s) of h100-80g, at data-sheet rates\n2 stages, cut by uniform")
    assert "1f1b, 4 micro-batches" in text and "bubble" in text
    data = json.loads(zgraph("forecast", TARGET, "--plan", plan(), "--json").stdout)
    assert data["world"] == 4 and len(data["ranks"]) == 2 and data["bubble"] > 0
    assert "--stage" in refused("forecast", TARGET, "--plan", plan(), "--program", "train")


def test_a_program_is_that_of_a_stage_and_says_which(plan):
    first = zgraph("dump", TARGET, "--plan", plan())
    assert "stage 0 of 2; --stage K shows another" in first.stderr
    assert first.stdout.startswith("# program train.stage0") and "layers_5" not in first.stdout
    second = zgraph("dump", TARGET, "--plan", plan(), "--stage", 1)
    assert not second.stderr and second.stdout.startswith("# program train.stage1") and "layers_5" in second.stdout
    assert "mesh dp 2" in second.stdout.splitlines()[0]
    update = zgraph("dump", TARGET, "--plan", plan(), "--stage", 1, "--update").stdout
    assert "layers_5_weight_exp_avg" in update and "layers_0" not in update


@pytest.mark.slow
def test_the_other_commands_take_a_stage_as_well(plan):
    path = plan()
    assert "train.stage1" in zgraph("memory", TARGET, "--plan", path, "--stage", 1).stdout
    assert "layers.5.weight" in zgraph("explain", TARGET, "layers.5.weight", "--plan", path, "--stage", 1).stdout
    rows = json.loads(zgraph("passes", TARGET, "--plan", path, "--stage", 1, "--json").stdout)["passes"]
    assert [row["name"] for row in rows][:2] == ["capture", "cleanup"]
    assert "train.stage1 alone" in zgraph("diff", TARGET, "--plan", path, "--stage", 1, "--from", "cleanup").stdout
    other = path.with_name("other.toml")
    other.write_text(path.read_text() + "zero = 1\n")
    both = zgraph("diff", TARGET, "--plan", path, "--to-plan", other, "--stage", 1).stdout
    assert both.startswith("programs of the stage")
    lanes = json.loads(zgraph("timeline", TARGET, "--plan", path, "--stage", 1).stdout)
    assert lanes["otherData"]["of"] == f"{TARGET}, stage 1 of 2"


def test_a_timeline_without_a_stage_is_the_schedules(plan):
    data = json.loads(zgraph("timeline", TARGET, "--plan", plan()).stdout)
    names = {event["name"] for event in data["traceEvents"] if event["ph"] == "X"}
    assert names == {f"{s}{k}{m}" for s in range(2) for k in "FB" for m in range(4)}
    assert data["otherData"]["schedule"] == "1f1b"
    assert "leave out --ranks" in refused("timeline", TARGET, "--plan", plan(), "--ranks", 2)


def test_plan_compares_pipelines(plan):
    assert "bubble" in zgraph("plan", TARGET, "--plan", plan()).stdout


def test_check_says_what_a_pipeline_takes(plan):
    text = zgraph("check", TARGET, "--plan", plan()).stdout
    assert "2 stages on 2 ranks idle for" in text and "on rank 0 of pp" in text and "0 errors" in text
    assert "can't be cut into 16 stages" in zgraph("check", TARGET, "--plan", plan(mesh="pp = 16"), code=1).stdout


@pytest.mark.parametrize("command", ["report", "bisect"])
def test_what_can_not_look_at_a_pipeline_says_so(command, plan, tmp_path):
    more = ("-o", tmp_path / "report.html") if command == "report" else ()
    assert "of a plan with a pipeline" in refused(command, "cli_targets:factory", "--plan", plan(), *more)
    assert not (tmp_path / "report.html").exists()


def test_a_stage_is_one_that_there_is(plan):
    assert "there is no stage 2" in refused("dump", TARGET, "--plan", plan(), "--stage", 2)
    whole = HERE.parent / "golden" / "plan.toml"
    assert "no pipeline" in refused("dump", TARGET, "--plan", whole, "--stage", 0)


def test_more_stages_than_there_can_be_are_refused(plan):
    text = refused("forecast", TARGET, "--plan", plan(mesh="pp = 16"))
    assert "can't be cut into 16 stages" in text and "mesh.pp" in text


def test_a_schedule_that_deadlocks_is_refused_with_its_cycle(plan):
    text = refused("forecast", TARGET, "--plan", plan('schedule = "cli_targets:deadlock"'))
    assert "deadlocks" in text and "which waits for" in text


def test_micro_batches_that_a_schedule_can_not_have_are_refused(plan):
    assert "would fit" in refused("forecast", TARGET, "--plan", plan('schedule = "dualpipev"', micro_batches=2))


def test_a_bundle_has_no_stages_to_choose_from(plan, tmp_path):
    folder = tmp_path / "bundle"
    zgraph("dump", TARGET, "--plan", plan(), "--stage", 1, "--format", "bundle", "-o", folder)
    assert "a bundle takes no --stage" in refused("dump", folder, "--stage", 1)
    assert zgraph("dump", folder).stdout.startswith("# program train.stage1")


@pytest.mark.slow
def test_hundreds_of_ranks_and_a_model_on_meta_take_one_capture(monkeypatch):
    from zgraph.forecast import pipeline_plan

    captures = []
    original = pipeline_plan.captured_program
    monkeypatch.setattr(pipeline_plan, "captured_program", lambda *given: captures.append(1) or original(*given))
    with torch.device("meta"):
        model = Llama(layers=8, dim=64, vocabulary=128)
    tokens = torch.zeros(8, 32, dtype=torch.int64)
    plan = plan_of(8, 8, mesh={"dp": 64}, zero=3, optimizer=AdamW(lr=1e-3))
    found = forecast_pipeline(model, plan, (tokens, tokens), 512)
    assert len(captures) == 1 and found.world == 512 and len(found.ranks) == 8
    assert len({stage.like for stage in found.stages}) == 3

"""`wire.auto`: formats are chosen by the simulator's time of a step, within an error that the plan allows."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from padded_rows import PaddedRows
from ranks import Ranks

import zgraph
from zgraph.build import resolve_auto_wire
from zgraph.build.planned_step import PlannedStep, captured_program, planned_step
from zgraph.build.resolve_auto_wire import DOUBT, GAIN_OVER_EXACT, MIN_GAIN, with_formats, with_slow_operators
from zgraph.build.wire_formats import WireFormats
from zgraph.errors import PlanError
from zgraph.passes.analysis.costs import Costs, Hardware, Link
from zgraph.passes.analysis.simulator import simulate_step
from zgraph.program.block_quantization import most_wrong_part
from zgraph.program.digest import digest
from zgraph.program.program import Program

FAST, SLOW = 1e13, 1e6  # bytes per second
ONE_ROUNDING = 0.005  # allows int8 where a value is rounded once
BATCH = torch.randn(8, 40)


def hardware(bandwidth: float) -> Hardware:
    links = {"*": Link(bandwidth=bandwidth, latency=1e-6)}
    return Hardware(name="test", flops={"float32": 1e11}, memory=1e10, capacity=10**9, host=1e9, links=links)


def plan(max_error: float | None = ONE_ROUNDING, **fields: Any) -> zgraph.Plan:
    wire = {**({"auto": True, "max_error": max_error} if max_error is not None else {}), **fields.pop("wire", {})}
    given = {"mesh": {"dp": -1}, "zero": 3, "backend": "eager", "optimizer": zgraph.AdamW(lr=1e-2), "wire": wire}
    return zgraph.Plan(**{**given, **fields})


@functools.cache
def captured(zero: int, replicas: int, micro: int) -> Program:
    mesh = {"replicate": replicas, "dp": 2}
    return captured_program(PaddedRows(), plan(None, mesh=mesh, zero=zero, micro_batches=micro), (BATCH,), 2 * replicas)


def step_of(asked: zgraph.Plan, bandwidth: float = SLOW) -> PlannedStep:
    """A step on two ranks, or on two groups of two."""
    world = 2 * asked.mesh.get("replicate", 1)
    program = captured(asked.zero, world // 2, asked.micro_batches).snapshot()
    program.mesh = asked.resolve_mesh(world)
    step = planned_step(PaddedRows(), asked, (BATCH,), world, Costs(hardware(bandwidth)), captured=program)
    step.step.history()
    return step


def chosen(asked: zgraph.Plan, bandwidth: float = SLOW) -> WireFormats:
    formats = step_of(asked, bandwidth).step.context.wire.formats
    assert formats is not None
    return formats


def pair(formats: WireFormats) -> tuple[str, str]:
    return formats.chosen.gather, formats.chosen.reduce


@functools.cache
def update_of(zero: int) -> Program:
    update = step_of(plan(None, zero=zero)).update()
    assert update is not None
    return update.program


def seconds(asked: zgraph.Plan, bandwidth: float) -> float:
    """What the simulator says of a whole step."""
    program = step_of(asked, bandwidth).step.history().program
    return simulate_step(program, update_of(asked.zero), Costs(hardware(bandwidth))).seconds


# -- what is chosen ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "bandwidth, max_error, formats",
    [
        (FAST, 0.5, ("same", "same")),
        (SLOW, ONE_ROUNDING, ("int8", "int8")),
        (SLOW, 0.5, ("int4", "int4")),
        (SLOW, 0.003, ("same", "same")),
    ],
)
def test_few_bits_are_taken_where_the_link_is_slow_and_the_error_allowed(
    bandwidth: float, max_error: float, formats: tuple[str, str]
) -> None:
    choice = chosen(plan(max_error), bandwidth)
    assert pair(choice) == formats and choice.chosen.error <= max_error
    assert (choice.chosen == choice.exact) == (formats == ("same", "same"))


@pytest.mark.parametrize("zero, bandwidth", list(itertools.product((1, 3), (1e8, SLOW))))
def test_a_step_is_never_slower_and_nearly_as_fast_as_by_any_formats_that_are_allowed(
    zero: int, bandwidth: float
) -> None:
    allowed = ("same", "bf16", "int8")
    ways = list(itertools.product(allowed, allowed))
    taken = {way: seconds(with_formats(plan(zero=zero), way), bandwidth) for way in ways}
    choice = chosen(plan(zero=zero), bandwidth)
    assert taken[pair(choice)] == pytest.approx(choice.chosen.seconds)
    assert taken["same", "same"] == pytest.approx(choice.exact.seconds)
    assert choice.chosen.seconds <= choice.exact.seconds
    assert choice.chosen.seconds <= (1 + MIN_GAIN) ** 2 * min(taken.values())


def test_few_bits_are_not_taken_where_slower_operators_would_undo_what_they_save() -> None:
    bandwidth = 8e8
    choice = chosen(plan(), bandwidth)
    program = step_of(plan(None, wire={"gather": "int8", "reduce": "int8"}), bandwidth).step.history().program
    costs = Costs(hardware(bandwidth))
    taken = [simulate_step(program, update_of(3), c).seconds for c in (costs, with_slow_operators(costs))]
    assert pair(choice) == ("same", "int8")
    assert taken[0] < 0.95 * choice.chosen.seconds and DOUBT * taken[1] > (1 - MIN_GAIN) * choice.chosen.doubted
    assert (
        choice.exact.doubted == pytest.approx(choice.exact.seconds, rel=0.5)
        and choice.exact.doubted > choice.exact.seconds
    )


def test_few_bits_are_not_taken_for_a_gain_that_forecasts_do_not_tell_from_none() -> None:
    bandwidth = 1e9
    program = step_of(plan(None, wire={"reduce": "int8"}), bandwidth).step.history().program
    choice = chosen(plan(), bandwidth)
    fewer = DOUBT * simulate_step(program, update_of(3), with_slow_operators(Costs(hardware(bandwidth)))).seconds
    assert choice.chosen == choice.exact
    assert 1 - GAIN_OVER_EXACT < fewer / choice.exact.doubted < 1 - MIN_GAIN


@pytest.mark.parametrize(
    "fields, roundings",
    [
        ({"zero": 3}, 1),
        ({"zero": 0}, 2),
        ({"zero": 3, "wire": {"rounding": "stochastic"}}, 2),
        ({"zero": 0, "wire": {"rounding": "stochastic"}}, 4),
        ({"zero": 3, "mesh": {"replicate": 2, "dp": 2}}, 3),
        ({"zero": 3, "mesh": {"replicate": 2, "dp": 2}, "wire": {"hierarchical": True}}, 2),
    ],
)
def test_what_is_rounded_several_times_may_be_wrong_as_often(fields: dict[str, Any], roundings: int) -> None:
    once = most_wrong_part("int8", 256)
    choice = chosen(plan(roundings * once, **fields))
    assert choice.chosen.reduce == "int8" and choice.chosen.error == pytest.approx(roundings * once)
    below = chosen(plan(roundings * once * 0.99, **fields))
    assert below.chosen.reduce != "int8" and below.chosen.error < roundings * once


def test_micro_batches_count_as_often_as_they_run() -> None:
    one, four = (chosen(plan(zero=zero, micro_batches=micro)) for zero, micro in ((3, 1), (3, 4)))
    assert four.exact.sent == 4 * one.exact.sent
    once = chosen(plan(0.5, zero=1, micro_batches=4))
    assert once.exact.sent == chosen(plan(0.5, zero=1)).exact.sent and pair(once) == ("int4", "int4")


def test_bytes_are_those_of_the_formats() -> None:
    choice = chosen(plan(0.5, wire={"auto": True, "block": 16}))
    part = 0.5 / 4 + 4 / 16 / 4  # half a byte for each element, and a scale for each block, of float32
    assert choice.chosen.sent / choice.exact.sent == pytest.approx(part, rel=0.02)


def test_a_memory_budget_is_kept_by_all_steps_that_are_tried() -> None:
    roomy = chosen(plan(memory_budget="1MiB"))
    assert pair(roomy) == ("int8", "int8")
    with pytest.raises(PlanError, match="does not fit into"):
        step_of(plan(memory_budget="1KiB"))


# -- the program ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bandwidth", [FAST, SLOW])
def test_the_program_is_that_of_the_plan_written_out(bandwidth: float) -> None:
    step = step_of(plan(wire={"error_feedback": True}), bandwidth).step
    formats = step.context.wire.formats
    assert formats is not None
    feedback = {"error_feedback": True} if formats.chosen.reduce != "same" else {}
    wire = {"gather": formats.chosen.gather, "reduce": formats.chosen.reduce, **feedback}
    by_hand = step_of(plan(None, wire=wire), bandwidth).step
    for variant in step.variants():
        assert digest(step.history(variant).program) == digest(by_hand.history(variant).program)


def test_a_choice_is_told_once_and_is_a_remark(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "zgraph.build.wire_formats"):
        step = step_of(plan()).step
        step.history(step.variants()[-1])
    (line,) = [r.getMessage() for r in caplog.records if r.name == "zgraph.build.wire_formats"]
    assert line.startswith("wire.auto: weights gathered in int8, gradients reduced in int8 (error at most 0.00394, ")
    assert ", as they are " in line and line.endswith(" ms")
    (remark,) = [r for r in step.history().program.remarks if r.made_by == "wire.auto"]
    assert line in str(remark) and "int4" in remark.why and remark.seconds > 0 and "wire.max_error=" in remark.remedy


@pytest.mark.parametrize("zero, formats", [(3, ("int4", "int4")), (0, ("same", "int4"))])
def test_the_error_that_a_remark_names_allows_what_it_says(zero: int, formats: tuple[str, str]) -> None:
    missed = chosen(plan(ONE_ROUNDING, zero=zero))
    remedy = missed.remark().remedy
    allowed = chosen(plan(float(remedy.removeprefix("wire.max_error=").split()[0]), zero=zero))
    assert pair(allowed) == formats and allowed.chosen.seconds < missed.chosen.seconds


def test_programs_that_only_predict_follow_and_send_weights_as_they_are_before() -> None:
    step = step_of(plan()).step
    captured = step.captured
    context = dataclasses.replace(step.context, plan=plan())
    follows = resolve_auto_wire.resolved(captured, context, training=False).plan.wire
    assert (follows.gather, follows.reduce, follows.auto) == ("int8", "int8", False)
    before = dataclasses.replace(context, wire=type(context.wire)())
    assert resolve_auto_wire.resolved(captured, before, training=False).plan.wire.gather == "same"
    assert before.wire.formats is None


def test_a_choice_comes_back_from_json() -> None:
    for max_error in (ONE_ROUNDING, 0.5):
        formats = chosen(plan(max_error))
        assert WireFormats.of(json.loads(json.dumps(dataclasses.asdict(formats)))) == formats


# -- ranks ------------------------------------------------------------------------------------------------------------
def trained(wire: dict[str, Any], file: str, folder: str | None, zero: int) -> tuple[list[float], list[Any], str]:
    """Losses of four steps, the weights behind them, and the report; with a `folder` the last two go on from one."""
    asked = plan(None, wire=wire, hardware=file, zero=zero)
    model = zgraph.compile(PaddedRows(), asked)
    draw = torch.Generator().manual_seed(3 + torch.distributed.get_rank())
    x = torch.randn(8, 40, generator=draw)
    losses = [float(model.zgraph.train_step(x)) for _ in range(2)]
    if folder is not None:
        model.save_checkpoint(folder)
        model = zgraph.compile(PaddedRows(), asked)
        model.load_checkpoint(folder)
    losses += [float(model.zgraph.train_step(x)) for _ in range(2)]
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return losses, [w.detach().clone() for w in weights], str(model.zgraph.report())


@pytest.mark.gloo
@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_train_as_by_the_plan_written_out_and_after_a_restart(two: Ranks, tmp_path: Path, zero: int) -> None:
    file = tmp_path / "test.json"
    file.write_text(hardware(SLOW).model_dump_json())
    auto = {"auto": True, "max_error": 0.01, "error_feedback": True}
    by_hand = {"gather": "int8" if zero else "same", "reduce": "int8", "error_feedback": True}
    expected = two.run(trained, by_hand, str(file), None, zero)
    for folder in (None, str(tmp_path / "checkpoint")):
        for found, right in zip(two.run(trained, auto, str(file), folder, zero), expected, strict=True):
            assert found[0] == right[0]
            assert all(torch.equal(a, b) for a, b in zip(found[1], right[1], strict=True))
            assert "gradients reduced in int8" in found[2] and "wire.auto" not in right[2]


# -- kept programs ----------------------------------------------------------------------------------------------------
def test_a_kept_choice_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZGRAPH_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "test.json"
    file.write_text(hardware(SLOW).model_dump_json())

    def reported() -> str:
        torch.manual_seed(0)
        model = zgraph.compile(PaddedRows(), plan(mesh={"dp": 1}, hardware=str(file)))
        model.zgraph.train_step(BATCH)
        return str(model.zgraph.report()).splitlines()[1]

    first = reported()
    assert first.startswith("wire.auto: weights gathered as they are, gradients reduced as they are: nothing")

    def no_search(*_: object) -> None:
        raise AssertionError("the choice is in the store")

    monkeypatch.setattr(resolve_auto_wire._Trials, "choose", no_search)
    assert reported() == first


# -- refused ----------------------------------------------------------------------------------------------------------
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"wire": {"auto": True}}, "wire.auto is set without wire.max_error"),
    ({"wire": {"max_error": 0.01}}, "wire.max_error is set without wire.auto"),
    ({"wire": {"auto": True, "max_error": 0}}, "max_error"),
    ({"wire": {"auto": True, "max_error": 1.0}}, "max_error"),
    ({"wire": {"auto": True, "max_error": -0.1}}, "max_error"),
    ({"wire": {"auto": True, "max_error": float("nan")}}, "max_error"),
    ({"wire": {"auto": "yes", "max_error": 0.1}}, "auto"),
    ({"wire": {"auto": True, "max_error": 0.1, "gather": "int8"}}, "together with wire.gather or wire.reduce"),
    ({"wire": {"auto": True, "max_error": 0.1, "reduce": "bf16"}}, "together with wire.gather or wire.reduce"),
    ({"mesh": {"pp": 2, "dp": -1}, "wire": {"auto": True, "max_error": 0.1}}, "in a pipeline"),
    (
        {"zero": 0, "optimizer": zgraph.OneBitAdam(lr=0.1), "wire": {"auto": True, "max_error": 0.1}},
        "together with a 1-bit optimizer",
    ),
]


@pytest.mark.parametrize("fields, said", REFUSED, ids=str)
def test_a_wrong_plan_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        zgraph.Plan(**{"zero": 3, "backend": "eager", **fields})


def test_verify_compares_what_the_chosen_formats_send(tmp_path: Path) -> None:
    file = tmp_path / "test.json"
    file.write_text(hardware(SLOW).model_dump_json())
    found = zgraph.verify(PaddedRows(), plan(hardware=str(file)), 2, (torch.randn(8, 40),))
    sent = {d.what for d in found.differences if d.what.startswith("sent")}
    assert found.ok and sent == {"sent value", "sent gradient"}, str(found)

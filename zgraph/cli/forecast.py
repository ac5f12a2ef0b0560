"""`zgraph forecast`: predicts a step's time and memory on some hardware, without running it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zgraph.cli.options import (
    AtOption,
    BatchOption,
    HardwareOption,
    JsonOption,
    OutputOption,
    PlanOption,
    ProgramOption,
    TargetArgument,
    WorldOption,
)
from zgraph.cli.output import give
from zgraph.cli.targets import load_plan, load_target, look, look_at_pipeline, resolve_world, with_hardware
from zgraph.units import shown_bytes

if TYPE_CHECKING:
    from zgraph.passes.analysis.costs import Costs
    from zgraph.passes.analysis.simulator import Forecast


def forecast(
    target: TargetArgument,
    plan: PlanOption = None,
    world: WorldOption = None,
    hardware: HardwareOption = None,
    batch: BatchOption = None,
    at: AtOption = None,
    program: ProgramOption = None,
    symbolic: Annotated[
        bool, typer.Option("--symbolic", help="Formulas in the world, the batch and the sequence length.")
    ] = False,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forecast a step: time by stream, exposed communication, peak memory.

    From data-sheet rates, which nothing reaches, it is a lower bound on time, good for comparing plans; from a file of
    zgraph calibrate it is what that machine takes.
    With --symbolic as formulas, and what they give at the target's own sizes: without a schedule they bound the time.
    Of a plan with a pipeline: where it is cut, each stage's time, the schedule's picture and bubble, and the memory of each rank.
    """
    if symbolic and program is not None:
        raise typer.BadParameter("formulas are of all programs of a step", param_hint="--program")
    if symbolic:
        _symbolic(target, plan, world, hardware, batch, output, as_json)
        return
    whole = look_at_pipeline(target, plan, world, hardware, batch)
    if whole is not None:
        if program is not None:
            raise typer.BadParameter(
                "a pipeline has programs for each stage: zgraph memory --stage K", param_hint="--program"
            )
        give(whole.to_json(), f"{_head(whole.world, whole.costs)}\n{whole}", as_json, output)
        return
    from zgraph.inspection.memory import peak_of

    inspection = look(target, plan, world, hardware, batch, program=program, at=at)
    step, costs = inspection.forecast, inspection.costs
    peak = peak_of(inspection)
    head = _head(inspection.world, costs)
    data = {
        "world": inspection.world,
        "hardware": inspection.hardware,
        "seconds": step.seconds,
        "exposed": step.exposed,
        "peak": peak.bytes,
        "programs": [_row(f, runs) for f, runs in step.times()],
    }
    peak_text = f"peak: {shown_bytes(peak.bytes)} in {peak.program}, with what is held besides it"
    give(data, f"{head}\n{step}\n{peak_text}", as_json, output)


def _head(world: int, costs: Costs) -> str:
    return f"{world} rank(s) of {costs.hardware.name}{'' if costs.hardware.measured else ', at data-sheet rates'}"


def _symbolic(
    target: str,
    plan: Path | None,
    world: int | None,
    hardware: str | None,
    batch: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    from zgraph.build.pass_pipeline import costs_of
    from zgraph.forecast.make_symbolic_forecast import symbolic_forecast

    the_plan = with_hardware(load_plan(plan), hardware)
    ranks, costs = resolve_world(the_plan, world), costs_of(the_plan)
    loaded_target = load_target(target, batch)
    formulas = symbolic_forecast(loaded_target.model, the_plan, loaded_target.inputs, costs)
    rows, sequence = formulas.sizes.batch, formulas.sizes.sequence
    here = formulas.at(world=ranks, batch=rows, sequence=sequence)
    data = {
        "hardware": costs.hardware.model_dump(mode="json"),
        **formulas.to_json(),
        "at": {"world": ranks, "batch": rows, "sequence": sequence, **asdict(here)},
    }
    give(data, f"{formulas}\n\nat world {ranks}, {formulas.sizes}: {here}", as_json, output)


def _row(forecast: Forecast, runs: int) -> dict[str, Any]:
    return {
        "name": forecast.program,
        "runs": runs,
        "seconds": forecast.seconds,
        "busy": forecast.busy,
        "exposed": forecast.exposed,
        "stalls": [{"node": s.node, "for": s.role.value, "seconds": s.seconds} for s in forecast.stalls],
        "moved": forecast.moved,
        "peak": forecast.peak,
    }

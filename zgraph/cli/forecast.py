"""`zgraph forecast`: how long a step will take on some hardware, and how much memory, without running it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zgraph.cli.targets import (
    JsonOption,
    PlanOption,
    TargetArgument,
    WorldOption,
    history_of,
    load_plan,
    load_target,
    resolve_world,
)

if TYPE_CHECKING:
    from zgraph.passes.simulator import Forecast

DEFAULT = "h100-80g"


def forecast(
    target: TargetArgument,
    plan: PlanOption = None,
    world: WorldOption = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            metavar="NAME",
            help="h100-80g, h200-141g, a100-80g, cpu, or the file of zgraph calibrate. [default: the plan's, else h100-80g]",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Forecast a step: time by stream, exposed communication, peak memory.

    From data-sheet rates, which nothing reaches, it is a lower bound on time, good for comparing plans; from a file of
    zgraph calibrate it is what that machine takes.
    """
    the_plan = load_plan(plan)
    ranks = resolve_world(the_plan, world)

    from zgraph.passes.simulator import simulate_step
    from zgraph.pipeline import costs_of

    the_plan = the_plan.model_copy(
        update={"hardware": hardware or the_plan.hardware or DEFAULT}
    )  # (schedules are for it)
    costs = costs_of(the_plan)
    found = load_target(target)
    program = history_of(found, the_plan, ranks, update=False).program
    updates = the_plan.optimizer is not None
    step = simulate_step(program, history_of(found, the_plan, ranks, update=True).program if updates else None, costs)
    if as_json:
        head = {"world": ranks, "hardware": costs.hardware.model_dump(mode="json")}
        body = {"seconds": step.seconds, "exposed": step.exposed, "programs": [_row(f) for f in step.programs]}
        typer.echo(json.dumps({**head, **body}, indent=1))
        return
    typer.echo(f"{ranks} rank(s) of {costs.hardware.name}{'' if costs.hardware.measured else ', at data-sheet rates'}")
    typer.echo(str(step))


def _row(made: Forecast) -> dict[str, Any]:
    return {
        "name": made.program,
        "seconds": made.seconds,
        "busy": made.busy,
        "exposed": made.exposed,
        "stalls": [{"node": s.node, "for": s.role.value, "seconds": s.seconds} for s in made.stalls],
        "peak": made.peak,
    }

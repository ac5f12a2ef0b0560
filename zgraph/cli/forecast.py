"""`zgraph forecast`: how long a step will take on some hardware, and how much memory, without running it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zgraph.cli.targets import (
    JsonOption,
    PlanOption,
    Target,
    TargetArgument,
    WorldOption,
    history_of,
    load_plan,
    load_target,
    resolve_world,
)

if TYPE_CHECKING:
    from zgraph.passes.costs import Costs
    from zgraph.passes.simulator import Forecast
    from zgraph.plan import Plan

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
    symbolic: Annotated[
        bool, typer.Option("--symbolic", help="Formulas in the world, the batch and the sequence length.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Forecast a step: time by stream, exposed communication, peak memory.

    From data-sheet rates, which nothing reaches, it is a lower bound on time, good for comparing plans; from a file of
    zgraph calibrate it is what that machine takes.
    With --symbolic as formulas, and what they give at the target's own sizes: without a schedule they bound the time.
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
    if symbolic:
        _symbolic(found, the_plan, ranks, costs, as_json)
        return
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


def _symbolic(target: Target, plan: Plan, world: int, costs: Costs, as_json: bool) -> None:
    from zgraph.symbolic import symbolic_forecast

    made = symbolic_forecast(target.model, plan, target.inputs, costs)
    batch, sequence = made.sizes.batch, made.sizes.sequence
    here = made.at(world=world, batch=batch, sequence=sequence)
    if as_json:
        figures = {"world": world, "batch": batch, "sequence": sequence, **asdict(here)}
        hardware = costs.hardware.model_dump(mode="json")
        typer.echo(json.dumps({"hardware": hardware, **made.to_json(), "at": figures}, indent=1))
        return
    typer.echo(f"{made}\n\nat world {world}, {made.sizes}: {here}")


def _row(made: Forecast) -> dict[str, Any]:
    return {
        "name": made.program,
        "seconds": made.seconds,
        "busy": made.busy,
        "exposed": made.exposed,
        "stalls": [{"node": s.node, "for": s.role.value, "seconds": s.seconds} for s in made.stalls],
        "moved": made.moved,
        "peak": made.peak,
    }

"""`zgraph explain`: tells why a node, a parameter, a pass or the peak is as it is, and what was missed."""

from __future__ import annotations

from typing import Annotated

import typer

from zgraph.cli.options import (
    AtOption,
    BatchOption,
    HardwareOption,
    JsonOption,
    OutputOption,
    PlanOption,
    ProgramOption,
    StageOption,
    TargetArgument,
    WorldOption,
)
from zgraph.cli.output import give
from zgraph.cli.targets import look


def explain(
    target: TargetArgument,
    what: Annotated[
        str | None,
        typer.Argument(metavar="[WHAT]", help="A node, a parameter, a pass, or 'peak'.", show_default=False),
    ] = None,
    missed: Annotated[
        bool, typer.Option("--missed", help="What passes would have liked to do, and could not.")
    ] = False,
    plan: PlanOption = None,
    world: WorldOption = None,
    hardware: HardwareOption = None,
    batch: BatchOption = None,
    at: AtOption = None,
    stage: StageOption = None,
    program: ProgramOption = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell the decisions that made something what it is: reason, cost, remedy."""
    if (what is None) is not missed:
        raise typer.BadParameter("WHAT, or --missed" if what is None else "WHAT or --missed, not both")
    from zgraph.inspection.explain import MISSED
    from zgraph.inspection.explain import explain as run

    explanation = run(
        look(target, plan, world, hardware, batch, program=program, stage=stage, at=at), MISSED if missed else str(what)
    )
    give(explanation.to_json(), str(explanation), as_json, output)

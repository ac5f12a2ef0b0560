"""`zgraph report`: writes everything about a step as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zgraph.cli.options import (
    AtOption,
    BatchOption,
    HardwareOption,
    JsonOption,
    PlanOption,
    TargetArgument,
    WorldOption,
)
from zgraph.cli.output import give, write_file
from zgraph.cli.targets import bundle_folder, load_plan, look, resolve_world

DEFAULT = Path("zgraph-report.html")


def report(
    target: TargetArgument,
    plan: PlanOption = None,
    world: WorldOption = None,
    hardware: HardwareOption = None,
    batch: BatchOption = None,
    at: AtOption = None,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The page to write.")] = DEFAULT,
    as_json: JsonOption = False,
) -> None:
    """Write a page to look at in a browser: every pass, the graph, memory, the timeline, parameters, what was missed.

    It is one file that needs no network.
    """
    if bundle_folder(target) is None:
        the_plan = load_plan(plan)
        the_plan.refuse_pipeline(resolve_world(the_plan, world), "page")
    inspection = look(target, plan, world, hardware, batch, at=at)

    from zgraph.inspection.html_report import html_report
    from zgraph.inspection.memory import peak_of

    content = html_report(inspection).encode()
    write_file(content, output)
    programs = [
        {"name": way.name, "kind": way.kind, "passes": len(way.snapshots) - 1, "nodes": way.last.facts["nodes"]}
        for way in inspection.ways.values()
    ]
    data = {
        "report": str(output),
        "bytes": len(content),
        "world": inspection.world,
        "seconds": inspection.forecast.seconds,
        "exposed": inspection.forecast.exposed,
        "peak": peak_of(inspection).bytes,
        "programs": programs,
    }
    if as_json:
        give(data, "", True, None)

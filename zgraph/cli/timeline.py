"""`zgraph timeline`: writes the simulated step as a trace for Perfetto, or compares it with a profile of a real run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from zgraph.cli.output import give, table, write
from zgraph.cli.targets import look, look_at_pipeline
from zgraph.errors import TargetError
from zgraph.units import milliseconds

if TYPE_CHECKING:
    from zgraph.inspection.compare_profile import Comparison

SHOWN = 30  # nodes, in the text


def timeline(
    target: TargetArgument,
    plan: PlanOption = None,
    world: WorldOption = None,
    hardware: HardwareOption = None,
    batch: BatchOption = None,
    at: AtOption = None,
    stage: StageOption = None,
    program: ProgramOption = None,
    ranks: Annotated[
        int, typer.Option("--ranks", metavar="N", min=1, help="Show the first N ranks: they run alike.")
    ] = 1,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against", metavar="TRACE", help="Set it beside a PyTorch profile (export_chrome_trace) of a real run."
        ),
    ] = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the simulated step as a Chrome trace: a lane for each stream, counters of live bytes, arrows from gathers to first uses.

    Of a plan with a pipeline it is that of the schedule, a lane for each stage of a rank, or with --stage that of one stage's programs. With
    --against it prints what each node was to take beside what a profile says it took.
    """
    if stage is None and program is None and against is None:
        whole = look_at_pipeline(target, plan, world, hardware, batch)
        if whole is not None:
            if ranks > 1:
                raise typer.BadParameter(
                    "a pipeline's timeline has all ranks of pp: leave out --ranks, or name a --stage"
                )
            from zgraph.stages.trace import trace_of as schedule_trace

            write(json.dumps(schedule_trace(whole.timeline)), output)
            return
    inspection = look(target, plan, world, hardware, batch, program=program, stage=stage, at=at)
    if ranks > inspection.world:
        raise typer.BadParameter(f"there are {inspection.world} ranks, not {ranks}")
    if against is None:
        from zgraph.inspection.trace import trace_of

        write(json.dumps(trace_of(inspection, ranks)), output)
        return
    from zgraph.inspection.compare_profile import beside

    comparison = beside(inspection, read_profile(against))
    give(comparison.to_json(), _text(comparison), as_json, output)


def _text(comparison: Comparison) -> str:
    """Return text that compares a forecast with a profile, the nodes that differ most first."""
    worst = sorted(comparison.rows, key=lambda row: -abs(row.measured - row.forecast))[:SHOWN]
    rows = [
        (
            row.node,
            row.operator,
            milliseconds(row.forecast),
            milliseconds(row.measured),
            f"{row.measured / row.forecast:.2f}" if row.forecast else "",
            row.module,
        )
        for row in worst
    ]
    lines = [str(comparison), "", table(("node", "operator", "forecast", "measured", "ratio", "module"), rows)]
    return "\n".join(lines)


def read_profile(path: Path) -> dict[str, object]:
    """Read a Chrome trace that torch.profiler exported. Raises `TargetError`."""
    import gzip

    try:
        content = path.read_bytes()
        data = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
    except (OSError, ValueError, EOFError) as error:
        raise TargetError("the profile can't be read", where=str(path), why=str(error)) from error
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        raise TargetError(
            "this is no profile",
            where=str(path),
            why="it has no traceEvents",
            hint="torch.profiler.profile().export_chrome_trace(FILE)",
        )
    return data

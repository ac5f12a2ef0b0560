"""`zgraph memory`: forecasts the peak, when it is and what holds it, checks bounds, and writes a snapshot for
PyTorch's memory visualiser."""

from __future__ import annotations

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
from zgraph.cli.output import CHECK_FAILED, give, table, write_file
from zgraph.cli.targets import look
from zgraph.units import milliseconds, shown_bytes

if TYPE_CHECKING:
    from zgraph.inspection.inspection import Inspection
    from zgraph.inspection.memory import Peak

TOP = 3  # the number of values that a failed check names


def memory(
    target: TargetArgument,
    plan: PlanOption = None,
    world: WorldOption = None,
    hardware: HardwareOption = None,
    batch: BatchOption = None,
    at: AtOption = None,
    stage: StageOption = None,
    program: ProgramOption = None,
    bounds: Annotated[
        list[str] | None,
        typer.Option(
            "--assert",
            metavar="BOUND",
            help="Exit with 1 unless this bound holds: 'peak<=72GiB', 'activations<=10GiB'.",
        ),
    ] = None,
    visualiser: Annotated[
        Path | None,
        typer.Option("--pickle", metavar="FILE", help="Write a snapshot for https://pytorch.org/memory_viz."),
    ] = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forecast the peak of a step: when it is, and who holds it, by category and module."""
    from zgraph.inspection.memory import data_of, parse_bound, peak_of

    wanted = [(text, parse_bound(text)) for text in bounds or ()]  # (an invalid bound is refused before the capture)
    inspection = look(target, plan, world, hardware, batch, program=program, stage=stage, at=at)
    checked = [(text, bound, peak_of(inspection, category=bound.category)) for text, bound in wanted]
    checks = [{"bound": text, "bytes": top.bytes, "holds": bound.holds(top.bytes)} for text, bound, top in checked]
    if visualiser is not None:
        from zgraph.inspection.memory_viz import pickle_of

        write_file(pickle_of(inspection), visualiser)
    give(data_of(inspection) | {"checks": checks}, text_of(inspection, peak_of(inspection)), as_json, output)
    failed = [(text, bound, top) for text, bound, top in checked if not bound.holds(top.bytes)]
    for text, bound, top in failed:
        over = shown_bytes(top.bytes - bound.bytes)
        typer.echo(f"zgraph: {text} does not hold: {shown_bytes(top.bytes)}, {over} too much", err=True)
        for holder in top.holders[:TOP]:
            typer.echo(f"  {holder.node}: {shown_bytes(holder.bytes)} of {holder.category}, {holder.module}", err=True)
    if failed:
        raise typer.Exit(CHECK_FAILED)


def text_of(inspection: Inspection, peak: Peak) -> str:
    """Return text with the peak, its categories and modules, and the largest values."""
    where = f"in {peak.program} at {peak.node}, {milliseconds(peak.seconds)} after its start"
    lines = [f"peak {shown_bytes(peak.bytes)} {where}; {inspection.world} rank(s) of {inspection.costs.hardware.name}"]
    measured = inspection.measured.get("peak")
    if measured:
        lines.append(f"measured {shown_bytes(measured)} in a step ({(peak.bytes - measured) / measured:+.1%} forecast)")
    for name, sizes in (("category", peak.categories), ("module", dict(list(peak.modules.items())[:15]))):
        rows = [(key, shown_bytes(size), f"{size / max(peak.bytes, 1):.1%}") for key, size in sizes.items()]
        lines += ["", table((name, "bytes", "share"), rows)]
    holders = [
        (h.node, h.type, shown_bytes(h.bytes), h.category, h.module, _short(h.source)) for h in peak.holders[:15]
    ]
    lines += ["", table(("largest", "type", "bytes", "category", "module", "line"), holders)]
    return "\n".join(lines)


def _short(source: str) -> str:
    return source.rpartition("/")[2]

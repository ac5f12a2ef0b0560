"""`zgraph diff`: the differences between the programs of two passes, two plans, or two bundles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zgraph.cli.options import (
    BatchOption,
    HardwareOption,
    JsonOption,
    OutputOption,
    PlanOption,
    ProgramOption,
    StageOption,
    TargetArgument,
    UpdateOption,
    WorldOption,
)
from zgraph.cli.output import give, table
from zgraph.cli.targets import bundle_folder, look, way_of
from zgraph.units import milliseconds, shown_bytes

if TYPE_CHECKING:
    from zgraph.inspection.diff import Difference, Row
    from zgraph.inspection.inspection import Inspection

SHOWN = 10  # nodes of a kind, in the text
STEP = ("world", "seconds", "exposed", "peak")


def diff(
    target: TargetArgument,
    other: Annotated[
        str | None,
        typer.Argument(metavar="[OTHER]", help="A second target or bundle, for its last program.", show_default=False),
    ] = None,
    plan: PlanOption = None,
    to_plan: Annotated[
        Path | None, typer.Option("--to-plan", metavar="FILE", help="Compare with what this plan makes of the target.")
    ] = None,
    world: WorldOption = None,
    hardware: HardwareOption = None,
    batch: BatchOption = None,
    before: Annotated[
        str | None, typer.Option("--from", metavar="PASS", help="The program after this pass. [default: the capture]")
    ] = None,
    after: Annotated[
        str | None, typer.Option("--to", metavar="PASS", help="The program after this pass. [default: the last]")
    ] = None,
    stage: StageOption = None,
    program: ProgramOption = None,
    update: UpdateOption = False,
    every: Annotated[bool, typer.Option("--all", help="Name every node, not the first ten of a kind.")] = False,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two programs: nodes added, removed, moved and changed; bytes, time and peak before and after.

    Of one target, two of its passes; with --to-plan or a second target, the finished programs of both.
    """
    from zgraph.inspection.diff import compare

    if other is not None and to_plan is not None:
        raise typer.BadParameter("a second target or --to-plan, not both")

    def seen(name: str, by: Path | None) -> Inspection:
        """Look at one of two targets. A bundle gets no options, since these are for the other target."""
        if other is not None and bundle_folder(name):
            return look(name)
        return look(name, by, world, hardware, batch, stage=stage)

    inspection = seen(target, plan)
    first = way_of(inspection, program, update)
    if other is None and to_plan is None:
        one = first.snapshots[0] if before is None else first.after(before)
        two = first.last if after is None else first.after(after)
        difference = compare(one, two)
        give(difference.to_json(), text_of(difference, first.name, None if every else SHOWN), as_json, output)
        return
    other_inspection = seen(other or target, to_plan if to_plan is not None else plan)
    second = way_of(other_inspection, program, update)
    one = first.last if before is None else first.after(before)
    two = second.last if after is None else second.after(after)
    names = (target, other) if other is not None else (str(plan or "the default plan"), str(to_plan))
    difference = compare(one, two, names)
    steps = {"before": _step(inspection), "after": _step(other_inspection)}
    data = difference.to_json() | {"steps": {key: dict(zip(STEP, row, strict=True)) for key, row in steps.items()}}
    text = f"{_whole(inspection, names, steps)}\n\n{text_of(difference, first.name, None if every else SHOWN)}"
    give(data, text, as_json, output)


def _whole(inspection: Inspection, names: tuple[str, str], steps: dict[str, tuple[int, float, float, int]]) -> str:
    """Return a table of both steps side by side, under their names."""
    of = "whole step" if inspection.plan.mesh.get("pp", 1) == 1 else "programs of the stage"
    return table((of, *names), _rows(steps["before"], steps["after"]))


def _step(inspection: Inspection) -> tuple[int, float, float, int]:
    """Return the ranks, seconds, exposed seconds and peak bytes of a whole step, with its update and its resident
    memory."""
    from zgraph.inspection.memory import peak_of

    return inspection.world, inspection.forecast.seconds, inspection.forecast.exposed, peak_of(inspection).bytes


def _rows(a: tuple[int, float, float, int], b: tuple[int, float, float, int]) -> list[tuple[str, str, str]]:
    return [
        ("ranks", str(a[0]), str(b[0])),
        ("time", milliseconds(a[1]), milliseconds(b[1])),
        ("exposed", milliseconds(a[2]), milliseconds(b[2])),
        ("peak", shown_bytes(a[3]), shown_bytes(b[3])),
    ]


def text_of(difference: Difference, program: str, shown: int | None) -> str:
    """Return text with the difference, and up to `shown` nodes of each kind by name. Its figures are those of the
    `program` alone."""
    a, b = difference.figures
    rows = [
        ("nodes", *map(str, difference.nodes), f"{difference.nodes[1] - difference.nodes[0]:+}"),
        ("time", milliseconds(a.seconds), milliseconds(b.seconds), f"{(b.seconds - a.seconds) * 1e3:+.3f} ms"),
        ("exposed", milliseconds(a.exposed), milliseconds(b.exposed), f"{(b.exposed - a.exposed) * 1e3:+.3f} ms"),
        ("peak", shown_bytes(a.peak), shown_bytes(b.peak), _signed(b.peak - a.peak)),
    ]
    lines = [table((f"{program} alone", difference.before, difference.after, "change"), rows)]
    if difference.empty:
        return "\n".join([*lines, "", "the programs are the same"])
    gone, came = difference.bytes
    lines += ["", f"values gone {shown_bytes(gone)}, new {shown_bytes(came)}", ""]
    kinds = [
        (what, operator, str(count), shown_bytes(size)) for what, operator, count, size in difference.by_operator()
    ]
    lines.append(table(("", "operator", "nodes", "bytes"), kinds))
    for what in ("added", "removed", "moved", "changed"):
        nodes: tuple[Row, ...] = getattr(difference, what)
        if not nodes:
            continue
        lines += ["", f"{what}:"]
        lines += [f"  {row.name}  {row.operator}{'  ' + row.of if row.of else ''}" for row in nodes[:shown]]
        if shown is not None and len(nodes) > shown:
            lines.append(f"  … {len(nodes) - shown} more (--all)")
    return "\n".join(lines)


def _signed(size: int) -> str:
    return f"{'-' if size < 0 else '+'}{shown_bytes(abs(size))}"

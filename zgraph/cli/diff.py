"""`zgraph diff`: what changed between two passes, two plans, or two bundles."""

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
    TargetArgument,
    UpdateOption,
    WorldOption,
)
from zgraph.cli.output import give, table
from zgraph.cli.targets import look, way_of
from zgraph.units import milliseconds, shown_bytes

if TYPE_CHECKING:
    from zgraph.inspection.diff import Difference, Row

SHOWN = 10  # nodes of a kind, in the text


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
    first = way_of(look(target, plan, world, hardware, batch), program, update)
    if other is None and to_plan is None:
        one, two = (
            first.snapshots[0] if before is None else first.after(before),
            first.last if after is None else first.after(after),
        )
        names = one.name, two.name
    else:
        second = way_of(
            look(other or target, to_plan if to_plan is not None else plan, world, hardware, batch), program, update
        )
        one = first.last if before is None else first.after(before)
        two = second.last if after is None else second.after(after)
        names = (target, other) if other is not None else (str(plan or "the default plan"), str(to_plan))
    found = compare(one, two, names)
    give(found.to_json(), text_of(found, None if every else SHOWN), as_json, output)


def text_of(found: Difference, shown: int | None) -> str:
    """The difference for people, with so many nodes of each kind by name."""
    a, b = found.figures
    rows = [
        ("nodes", *map(str, found.nodes), f"{found.nodes[1] - found.nodes[0]:+}"),
        ("time", milliseconds(a.seconds), milliseconds(b.seconds), f"{(b.seconds - a.seconds) * 1e3:+.3f} ms"),
        ("exposed", milliseconds(a.exposed), milliseconds(b.exposed), f"{(b.exposed - a.exposed) * 1e3:+.3f} ms"),
        ("peak", shown_bytes(a.peak), shown_bytes(b.peak), _signed(b.peak - a.peak)),
    ]
    lines = [table(("", found.before, found.after, "change"), rows)]
    if found.empty:
        return "\n".join([*lines, "", "the programs are the same"])
    gone, came = found.bytes
    lines += ["", f"values gone {shown_bytes(gone)}, new {shown_bytes(came)}", ""]
    kinds = [(what, operator, str(count), shown_bytes(size)) for what, operator, count, size in found.by_operator()]
    lines.append(table(("", "operator", "nodes", "bytes"), kinds))
    for what in ("added", "removed", "moved", "changed"):
        nodes: tuple[Row, ...] = getattr(found, what)
        if not nodes:
            continue
        lines += ["", f"{what}:"]
        lines += [f"  {row.name}  {row.operator}{'  ' + row.of if row.of else ''}" for row in nodes[:shown]]
        if shown is not None and len(nodes) > shown:
            lines.append(f"  … {len(nodes) - shown} more (--all)")
    return "\n".join(lines)


def _signed(size: int) -> str:
    return f"{'-' if size < 0 else '+'}{shown_bytes(abs(size))}"

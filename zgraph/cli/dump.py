"""`zgraph dump`: a program after any pass, as text, Python, JSON, a drawing, or for Model Explorer."""

from __future__ import annotations

import fnmatch
import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

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
    UpdateOption,
    WorldOption,
)
from zgraph.cli.output import progress, use_color, write, write_file
from zgraph.cli.targets import bundle_folder, load_plan, look, planned_passes, way_of
from zgraph.errors import PassError
from zgraph.names import did_you_mean

if TYPE_CHECKING:
    from zgraph.inspection.inspection import Inspection, PassTrace
    from zgraph.program.program import Program


class Format(StrEnum):
    TEXT = "text"
    PYTHON = "python"
    JSON = "json"
    DOT = "dot"
    EXPLORER = "explorer"
    BUNDLE = "bundle"


class Changed(StrEnum):
    WHOLE = "whole"
    DIFF = "diff"


class DumpCommand(TyperCommand):
    """The command whose `--print-changed` may be given without a value, which typer's own options can't."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["--print-changed=whole" if a == "--print-changed" else a for a in args])


def dump(
    target: TargetArgument,
    plan: PlanOption = None,
    world: WorldOption = None,
    hardware: HardwareOption = None,
    batch: BatchOption = None,
    at: AtOption = None,
    after: Annotated[
        str | None,
        typer.Option("--after", metavar="PASS", help="The program after this pass. [default: the last]"),
    ] = None,
    changed: Annotated[
        Changed | None,
        typer.Option(
            "--print-changed",
            metavar="[=diff]",
            help="After each pass that changes the program, print it, or a diff (=diff).",
        ),
    ] = None,
    filter: Annotated[
        str | None,
        typer.Option("--filter", metavar="GLOB", help="Only nodes whose name, module or parameter matches."),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank",
            metavar="R",
            min=0,
            help="Also print where rank R is in the mesh; the program is the same on every rank.",
        ),
    ] = None,
    stop_after: Annotated[
        str | None, typer.Option("--stop-after", metavar="PASS", help="Run no pass behind this one.")
    ] = None,
    disable: Annotated[
        list[str] | None, typer.Option("--disable", metavar="PASS", help="Leave this pass out (may be repeated).")
    ] = None,
    stage: StageOption = None,
    program: ProgramOption = None,
    update: UpdateOption = False,
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="explorer is for Model Explorer; with -o its overlays come beside it. bundle is a folder with all of the step.",
        ),
    ] = Format.TEXT,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the program that a plan makes of a model: readable text, or a form for other tools."""
    form = Format.JSON if as_json else form
    _refuse_conflicts(form, filter, changed, after, update and program is not None, output)
    _refuse_unknown(target, plan, update, [n for n in (after, stop_after, *(disable or ())) if n is not None])
    edited = None
    if stop_after is not None or disable:
        from zgraph.build.pass_pipeline import PassFilter

        edited = PassFilter(frozenset(disable or ()), stop_after)
    inspection = look(target, plan, world, hardware, batch, pass_filter=edited, stage=stage, at=at)
    if rank is not None and rank >= inspection.world:
        raise typer.BadParameter(
            f"there is no rank {rank} in a world of {inspection.world}: they are 0 to {inspection.world - 1}"
        )
    if form is Format.BUNDLE:
        from zgraph.inspection import bundle

        assert output is not None
        with progress("writing the bundle"):
            bundle.write(inspection, output)
        typer.echo(f"wrote {output}", err=True)
        return
    way = way_of(inspection, program, update)
    if changed is not None:
        write(_changes(way, changed, filter), output)
        return
    shown = (way.last if after is None else way.after(after)).program
    place = None if rank is None else rank_place(shown, rank, filter or "*")
    write(_rendered(shown, inspection, form, filter, place, output), output)


def _refuse_conflicts(
    form: Format,
    filter: str | None,
    changed: Changed | None,
    after: str | None,
    both: bool,
    output: Path | None,
) -> None:
    """Raise `BadParameter` for options that exclude each other; `both`: --update and --program are given."""
    if filter is not None and form not in (Format.TEXT, Format.DOT):
        raise typer.BadParameter(f"--format {form} is of whole programs: leave out --filter")
    if changed is not None and form is not Format.TEXT:
        raise typer.BadParameter(f"--print-changed is text: leave out --format {form}")
    if changed is not None and after is not None:
        raise typer.BadParameter("--print-changed is of every pass: leave out --after")
    if changed is Changed.DIFF and filter is not None:
        raise typer.BadParameter("--print-changed=diff is of whole programs: leave out --filter")
    if both:
        raise typer.BadParameter("--update or --program, not both")
    if form is Format.BUNDLE and (output is None or after is not None):
        raise typer.BadParameter("--format bundle is of all passes, and needs -o FOLDER")


def _refuse_unknown(target: str, plan: Path | None, update: bool, wanted: list[str]) -> None:
    """Raise `PassError` for passes that are not in the pipeline, before the capture, which takes longer."""
    if wanted and bundle_folder(target) is None:
        the_plan = load_plan(plan)
        planned = [p.name for training in (True, False) for p in planned_passes(the_plan, update, training=training)]
        for name in wanted:
            if name not in ["capture", *planned]:
                raise PassError(
                    f"there is no pass {name!r} in this pipeline", hint=did_you_mean(name, ["capture", *planned])
                )


def _rendered(
    program: Program,
    inspection: Inspection,
    form: Format,
    filter: str | None,
    place: dict[str, Any] | None,
    output: Path | None,
) -> str:
    if form is Format.JSON:
        from zgraph.program.serialize import to_json

        data = to_json(program)
        return json.dumps(data if place is None else {**data, "rank": place}, allow_nan=False)
    if form is Format.EXPLORER:
        from zgraph.inspection.formats.explorer import explorer, overlays

        for name, data in overlays(program, inspection.costs).items() if output is not None else ():
            assert output is not None
            write_file(json.dumps(data).encode(), output.with_name(f"{output.stem}.{name}.json"))
        return json.dumps(explorer(program))
    head = "" if place is None else _rank_text(place)
    if form is Format.DOT:
        from zgraph.inspection.formats.dot import dot
        from zgraph.program.printer import matching

        return "".join(f"//{line[1:]}\n" for line in head.splitlines()) + dot(program, matching(program, filter))
    if form is Format.PYTHON:
        from zgraph.inspection.formats.python import python_source

        return head + python_source(program)
    from zgraph.program.printer import render

    return head + render(program, color=output is None and use_color(sys.stdout), filter=filter)


def _changes(way: PassTrace, changed: Changed, filter: str | None) -> str:
    """Return each program that a pass changed, or its difference from the one before, under the pass's name."""
    from zgraph.program.printer import diff, render

    parts: list[str] = []
    for before, after in zip(way.snapshots, way.snapshots[1:], strict=False):
        text = diff(before.program, after.program)
        if not text:
            continue
        shown = text if changed is Changed.DIFF else render(after.program, filter=filter)
        parts.append(f"# ==== after {after.name}: {after.summary} ====\n{shown.rstrip()}\n")
    return "\n".join(parts) or "no pass changed it"


def rank_place(program: Program, rank: int, params: str = "*") -> dict[str, Any]:
    """Return a rank's coordinates in the mesh, the ranks of its groups, and its parts and rows of the parameters that
    match a glob.

    A part is what the rank holds of a parameter that ranks divide (tensor parallelism), and rows are its shard of that
    part.
    """
    from zgraph.verification.virtual_ranks import coordinates, group_ranks

    at = coordinates(program.mesh, rank)
    rows: dict[str, list[int]] = {}
    parts: dict[str, dict[str, int]] = {}
    for spec in program.params.values():
        if not fnmatch.fnmatchcase(spec.name, params):
            continue
        if (by := spec.division) is not None:
            parts[spec.name] = {"dim": by.dim, "part": at[by.mesh_dim], "of": by.ranks}
        if spec.shard_dim is not None:
            first = min(spec.rows * at[spec.shard_dim], spec.shape[0])
            rows[spec.name] = [first, min(first + spec.rows, spec.shape[0])]
    return {
        "rank": rank,
        "world": program.world,
        "coordinates": at,
        "groups": {dim: group_ranks(program.mesh, dim, rank) for dim in program.mesh},
        "parts": parts,
        "rows": rows,
    }


def _rank_text(place: dict[str, Any]) -> str:
    lines = [f"# rank {place['rank']} of {place['world']}"]
    for dim, at in place["coordinates"].items():
        lines.append(f"#   {dim} {at}, in a group with ranks {_ranges(place['groups'][dim])}")
    for name in dict.fromkeys([*place["parts"], *place["rows"]]):
        said = []
        if name in place["parts"]:
            part = place["parts"][name]
            said.append(f"part {part['part']} of {part['of']} along dimension {part['dim']}")
        if name in place["rows"]:
            first, end = place["rows"][name]
            said.append(f"rows {first} to {end - 1}" if end > first else "no rows, padding only")
        lines.append(f"#   {name}: {', '.join(said)}")
    return "\n".join(lines) + "\n"


def _ranges(ranks: list[int]) -> str:
    """Return ranks as text: "0, 4, 8" or, without gaps, "0 to 7"."""
    whole = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]} to {ranks[-1]}" if whole else ", ".join(map(str, ranks))

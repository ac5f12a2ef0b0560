"""`zgraph dump`: a program as text or JSON, after any pass."""

from __future__ import annotations

import fnmatch
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zgraph.cli.targets import (
    JsonOption,
    PlanOption,
    TargetArgument,
    UpdateOption,
    WorldOption,
    did_you_mean,
    history_of,
    load_plan,
    load_target,
    planned_passes,
    resolve_world,
    use_color,
    write,
)
from zgraph.errors import PassError

if TYPE_CHECKING:
    from zgraph.program.program import Program


def dump(
    target: TargetArgument,
    plan: PlanOption = None,
    world: WorldOption = None,
    after: Annotated[
        str | None,
        typer.Option("--after", metavar="PASS", help="The program after this pass. [default: the last]"),
    ] = None,
    filter: Annotated[
        str | None,
        typer.Option("--filter", metavar="GLOB", help="Only nodes whose name, module or parameter matches."),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option("--rank", metavar="R", min=0, help="Say too where rank R stands: the program is every rank's."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write to a file.", show_default=False),
    ] = None,
    update: UpdateOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print the program that a plan makes of a model, as Python."""
    if as_json and filter is not None:
        raise typer.BadParameter("JSON holds whole programs: leave out --json or --filter")
    the_plan = load_plan(plan)
    ranks = resolve_world(the_plan, world)
    if rank is not None and rank >= ranks:
        raise typer.BadParameter(f"there is no rank {rank} in a world of {ranks}: they are 0 to {ranks - 1}")

    if after is not None:  # before the capture, which takes its time
        planned = [p.name for training in (True, False) for p in planned_passes(the_plan, update, training=training)]
        _check_pass(after, ["capture", *planned])
    found = load_target(target)

    from zgraph.program.serial import to_json
    from zgraph.program.text import render

    history = history_of(found, the_plan, ranks, update)
    if after is not None:
        _check_pass(after, [r.name for r in history.records])
    program = history.program if after is None else history.after(after)
    place = None if rank is None else rank_place(program, rank, filter or "*")
    if as_json:
        data = to_json(program)
        write(json.dumps(data if place is None else {**data, "rank": place}, allow_nan=False), output)
        return
    text = render(program, color=output is None and use_color(sys.stdout), filter=filter)
    write(text if place is None else _rank_text(place) + text, output)


def _check_pass(name: str, known: list[str]) -> None:
    if name not in known:
        raise PassError(f"there is no pass {name!r} in this pipeline", hint=did_you_mean(name, known))


def rank_place(program: Program, rank: int, params: str = "*") -> dict[str, Any]:
    """A rank's place in the mesh, the ranks of its groups, its rows of the parameters that match a glob."""
    from zgraph.passes.virtual import coordinates, group_ranks

    at = coordinates(program.mesh, rank)
    rows = {}
    for spec in program.params.values():
        if spec.shard_dim is not None and fnmatch.fnmatchcase(spec.name, params):
            first = min(spec.rows * at[spec.shard_dim], spec.shape[0])
            rows[spec.name] = [first, min(first + spec.rows, spec.shape[0])]
    return {
        "rank": rank,
        "world": program.world,
        "coordinates": at,
        "groups": {dim: group_ranks(program.mesh, dim, rank) for dim in program.mesh},
        "rows": rows,
    }


def _rank_text(place: dict[str, Any]) -> str:
    lines = [f"# rank {place['rank']} of {place['world']}"]
    for dim, at in place["coordinates"].items():
        lines.append(f"#   {dim} {at}, in a group with ranks {_ranges(place['groups'][dim])}")
    for name, (first, end) in place["rows"].items():
        lines.append(f"#   {name}: {f'rows {first} to {end - 1}' if end > first else 'no rows, padding only'}")
    return "\n".join(lines) + "\n"


def _ranges(ranks: list[int]) -> str:
    """ "0, 4, 8" or, without gaps, "0 to 7"."""
    whole = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]} to {ranks[-1]}" if whole else ", ".join(map(str, ranks))

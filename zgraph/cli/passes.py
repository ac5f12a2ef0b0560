"""`zgraph passes`: the pipeline of a plan; with a target also what each pass did to it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zgraph.cli.targets import (
    JsonOption,
    PlanOption,
    UpdateOption,
    WorldOption,
    history_of,
    load_plan,
    load_target,
    planned_passes,
    resolve_world,
)

if TYPE_CHECKING:
    from zgraph.passes import Contract


def passes(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[TARGET]", help="Run the pipeline on this model and count.", show_default=False),
    ] = None,
    plan: PlanOption = None,
    world: WorldOption = None,
    update: UpdateOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the passes that a plan runs, in order."""
    the_plan = load_plan(plan)
    ranks = resolve_world(the_plan, world)

    planned = [p for training in (False, True) for p in planned_passes(the_plan, update, training=training)]
    contracts = {p.name: p.contract for p in planned}
    missed: list[dict[str, Any]] = []
    if target is None:
        rows = [_row(p.name, p.contract.summary, p.contract) for p in planned_passes(the_plan, update)]
    else:
        rows = []
        history = history_of(load_target(target), the_plan, ranks, update)
        missed = [asdict(r) | {"text": str(r)} for r in history.program.remarks]
        for record in history.records:
            row = _row(record.name, record.summary, contracts.get(record.name))
            row |= {"seconds": record.seconds, "verify_seconds": record.verify_seconds}
            rows.append(row | {"nodes": record.nodes, "stats": dict(record.stats)})
    if as_json:
        typer.echo(json.dumps({"world": ranks, "passes": rows, "remarks": missed}, indent=1))
        return
    typer.echo("\n".join(_text(row, max(len(r["name"]) for r in rows)) for row in rows))
    for remark in sorted(missed, key=lambda r: -r["seconds"]):
        typer.echo(f"missed by {remark['made_by']}: {remark['text']}")


def _row(name: str, summary: str, contract: Contract | None) -> dict[str, Any]:
    """One pass as JSON has it; the capture, which is no pass, has no contract."""
    return {
        "name": name,
        "summary": summary,
        "requires": sorted(contract.requires) if contract else [],
        "provides": sorted(contract.provides) if contract else [],
        "conflicts": sorted(contract.conflicts) if contract else [],
        "bitwise": contract.bitwise if contract else True,
        "level": contract.level.name.lower() if contract and contract.level is not None else None,
    }


def _text(row: dict[str, Any], width: int) -> str:
    indent = " " * (width + 2)
    lines = [f"{row['name']:{width}}  {row['summary']}"]
    facts = [f"{key} {', '.join(row[key])}" for key in ("requires", "provides", "conflicts") if row[key]]
    if facts:
        lines.append(indent + "; ".join(facts))
    if "seconds" in row:
        stats = [f"{count} {name}" for name, count in row["stats"].items()]
        verified = f"(verified in {row['verify_seconds']:.3f} s)"
        lines.append(indent + ", ".join([f"{row['nodes']} nodes, {row['seconds']:.3f} s {verified}", *stats]))
    return "\n".join(lines)

"""`zgraph passes`: lists the pass pipeline of a plan; with a target, also what each pass did to its program."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zgraph.cli.options import (
    BatchOption,
    HardwareOption,
    JsonOption,
    OutputOption,
    PlanOption,
    ProgramOption,
    StageOption,
    UpdateOption,
    WorldOption,
)
from zgraph.cli.output import give, table
from zgraph.cli.targets import load_plan, look, planned_passes, resolve_world, way_of

if TYPE_CHECKING:
    from zgraph.plan.plan import Plan


def passes(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[TARGET]", help="Run the pipeline on this model and count.", show_default=False),
    ] = None,
    plan: PlanOption = None,
    world: WorldOption = None,
    hardware: HardwareOption = None,
    batch: BatchOption = None,
    stage: StageOption = None,
    program: ProgramOption = None,
    update: UpdateOption = False,
    why: Annotated[
        bool, typer.Option("--why", help="List every pass: whether the plan runs it, and why or why not.")
    ] = False,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the passes that a plan runs, in order, and what they missed."""
    if why:
        if target is not None:
            raise typer.BadParameter("--why: only without a TARGET")
        _give_reasons(load_plan(plan), update, as_json, output)
        return
    if target is None:
        only = (("hw", hardware), ("batch", batch), ("stage", stage), ("program", program))
        if given := [f"--{name}" for name, value in only if value is not None]:
            raise typer.BadParameter(f"{', '.join(given)}: only with a TARGET")
        the_plan = load_plan(plan)
        ranks = resolve_world(the_plan, world)

        from zgraph.inspection.snapshot import facts_of

        rows = [facts_of(p.name, p.contract.summary, p.contract, p.options) for p in planned_passes(the_plan, update)]
        missed: list[dict[str, Any]] = []
    else:
        inspection = look(target, plan, world, hardware, batch, stage=stage)
        ranks, way = inspection.world, way_of(inspection, program, update)

        from zgraph.inspection.diff import compare

        rows = [dict(s.facts) for s in way.snapshots]
        for row, before, after in zip(rows[1:], way.snapshots, way.snapshots[1:], strict=False):
            changed = compare(before, after, simulate=False)
            row["changed"] = {key: len(getattr(changed, key)) for key in ("added", "removed", "moved", "changed")}
        missed = sorted(way.remarks, key=lambda r: -r["seconds"])
    width = max(len(row["name"]) for row in rows)
    lines = [_text(row, width) for row in rows]
    lines += [f"missed by {remark['made_by']}: {remark['text']}" for remark in missed]
    give({"world": ranks, "passes": rows, "remarks": missed}, "\n".join(lines), as_json, output)


def _give_reasons(plan: Plan, update: bool, as_json: bool, output: Path | None) -> None:
    from zgraph.build.pass_pipeline import explain_step_passes, explain_update_passes

    explained_passes = explain_update_passes(plan) if update else explain_step_passes(plan)
    rows = [
        {"name": f.contract.name, "summary": f.contract.summary, "runs": f.decision.runs, "why": f.decision.why}
        for f in explained_passes
    ]
    shown = [(row["name"], "runs" if row["runs"] else "-", row["why"]) for row in rows]
    give({"passes": rows}, table(("pass", "", "why"), shown), as_json, output)


def _text(row: dict[str, Any], width: int) -> str:
    indent = " " * (width + 2)
    lines = [f"{row['name']:{width}}  {row['summary']}"]
    facts = [f"{key} {', '.join(row[key])}" for key in ("requires", "provides", "conflicts") if row[key]]
    if facts:
        lines.append(indent + "; ".join(facts))
    options = [f"{key}={value!r}" for key, value in row["options"].items() if value not in (None, [], "")]
    if options:
        lines.append(indent + f"options {', '.join(options)}")
    if "seconds" in row:
        stats = [f"{count} {name}" for name, count in row["stats"].items()]
        verified = f"(verified in {row['verify_seconds']:.3f} s)"
        lines.append(indent + ", ".join([f"{row['nodes']} nodes, {row['seconds']:.3f} s {verified}", *stats]))
        changed = [f"{count} {what}" for what, count in row.get("changed", {}).items() if count]
        if changed:
            lines.append(indent + f"nodes: {', '.join(changed)}")
    return "\n".join(lines)

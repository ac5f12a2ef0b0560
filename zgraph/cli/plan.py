"""`zgraph plan`: plans compared on a model, or the best one looked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zgraph.cli.options import BatchOption, HardwareOption, JsonOption, TargetArgument, WorldOption
from zgraph.cli.output import CHECK_FAILED, give, progress, table
from zgraph.cli.targets import load_plan, load_target, refuse_bundle, resolve_world, with_hardware
from zgraph.errors import TargetError
from zgraph.units import milliseconds, shown_bytes

if TYPE_CHECKING:
    from zgraph.inspection.plans import Evaluation


def plan(
    target: TargetArgument,
    plans: Annotated[
        list[Path] | None,
        typer.Option(
            "--plan", metavar="FILE", help="A plan to compare (may be repeated), or with --search to begin from."
        ),
    ] = None,
    search: Annotated[
        bool,
        typer.Option(
            "--search", help="Look for the fastest that fits: ZeRO stages, micro-batches, and what the budget decides."
        ),
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget", metavar="SIZE", help="Bytes of a device. [default: the plan's, else 0.95 of the hardware's]"
        ),
    ] = None,
    world: WorldOption = None,
    hardware: HardwareOption = None,
    batch: BatchOption = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the best plan: .toml, .yaml or .json.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare plans on a model by simulation: step time, exposed communication, peak; write the best.

    All get the same batch of a rank, cut into their micro-batches. Exits with 1 if none fits.
    """
    refuse_bundle(target, "plan")
    if search and len(plans or ()) > 1:
        raise typer.BadParameter("--search begins from one plan")
    from zgraph.inspection.plans import evaluate, limit_of
    from zgraph.inspection.plans import search as run

    paths: list[Path | None] = list(plans) if plans else [None]
    given = {str(path or "the default plan"): with_hardware(load_plan(path), hardware) for path in paths}
    found = load_target(target, batch)
    rows: list[Evaluation] = []
    for name, one in given.items():
        ranks = resolve_world(one, world)
        limit = _bytes(budget) if budget is not None else limit_of(one)
        with progress(f"evaluating {name}"):
            rows += (
                run(found.model, found.inputs, one, ranks, limit)
                if search
                else [evaluate(found.model, found.inputs, one, ranks, name)]
            )
    ranked = sorted(rows, key=lambda e: (not e.fits(limit), e.seconds, e.peak))
    best = ranked[0] if ranked[0].fits(limit) else None
    lines = [
        table(
            ("plan", "step", "exposed", "peak", "fits", "of the best"),
            [_row(e, limit, best) for e in ranked],
        ),
        "",
        f"within {shown_bytes(limit)} on {ranks} rank(s) of {ranked[0].plan.hardware}: "
        + (f"{best.name} is the fastest" if best else "none fits"),
    ]
    lines += [f"{e.name}: {e.problem}" for e in ranked if e.problem]
    data = {"world": ranks, "limit": limit, "best": best.name if best else None, "plans": [e.to_json() for e in ranked]}
    give(data, "\n".join(lines), as_json, None)
    if best is None:
        raise typer.Exit(CHECK_FAILED)
    if output is not None:
        best.plan.save(output)
        typer.echo(f"wrote {output}", err=True)


def _row(found: Evaluation, limit: int, best: Evaluation | None) -> tuple[str, ...]:
    if not found.possible:
        return (found.name, "", "", "", "no", "")
    ratio = f"{found.seconds / best.seconds:.2f}" if best else ""
    times = milliseconds(found.seconds), milliseconds(found.exposed)
    return (found.name, *times, shown_bytes(found.peak), "yes" if found.fits(limit) else "no", ratio)


def _bytes(text: str) -> int:
    from zgraph.communication import parse_bytes
    from zgraph.errors import PlanError

    try:
        size = int(text) if text.isdigit() else parse_bytes(text)
    except PlanError as error:
        raise TargetError(f"{text!r} is no size", where="--budget", hint=error.hint) from error
    if not isinstance(size, int) or size < 1:
        raise TargetError(f"{text!r} is no size", where="--budget", hint='a number and a unit: "20GiB"')
    return size

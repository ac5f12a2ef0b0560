"""`zgraph plan`: compares plans on a model, or searches for the best one."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zgraph.cli import configuration_report
from zgraph.cli.options import BatchOption, HardwareOption, JsonOption, WorldOption
from zgraph.cli.output import CHECK_FAILED, give, progress, table
from zgraph.cli.targets import load_plan, load_target, refuse_bundle, resolve_world, with_hardware
from zgraph.errors import TargetError
from zgraph.units import milliseconds, shown_bytes

if TYPE_CHECKING:
    from zgraph.inspection.compare_plans import Evaluation
    from zgraph.plan.plan import Plan

INTERRUPTED = 130  # the exit code that shells use after SIGINT
SUFFIXES = (".toml", ".yaml", ".yml", ".json")


def plan(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET", help="A model: package.module:factory, hf:DIR, or an example's name.", show_default=False
        ),
    ] = None,
    plans: Annotated[
        list[Path] | None,
        typer.Option(
            "--plan", metavar="FILE", help="A plan to compare (may be repeated), or with --search to begin from."
        ),
    ] = None,
    from_deepspeed: Annotated[
        Path | None,
        typer.Option(
            "--from-deepspeed",
            metavar="FILE",
            help="Tell what becomes of each key of a DeepSpeed configuration, and write the plan; TARGET gives the hidden size.",
        ),
    ] = None,
    from_accelerate: Annotated[
        Path | None,
        typer.Option(
            "--from-accelerate",
            metavar="FILE",
            help="The same of a file that `accelerate config` writes (YAML), with its DeepSpeed or FSDP section.",
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

    All get the same batch of a rank, cut into their micro-batches. Exits with 1 if none fits. A search that is interrupted (Ctrl-C, SIGTERM)
    tells and writes the best so far, and exits with 130.
    """
    if output is not None and output.suffix not in SUFFIXES:
        raise typer.BadParameter(
            f"a plan is written as {', '.join(SUFFIXES)}, not {output.suffix or 'without a suffix'}"
        )
    if from_deepspeed is not None or from_accelerate is not None:
        if plans or search or (from_deepspeed and from_accelerate):
            raise typer.BadParameter(
                "--from-deepspeed and --from-accelerate make a plan, of one file: write it with -o, and compare it with --plan"
            )
        model = None if target is None else load_target(target, batch).model
        _convert(from_deepspeed, from_accelerate, world, model, as_json, output)
        return
    if target is None:
        raise typer.BadParameter("name a model, or give --from-deepspeed or --from-accelerate", param_hint="TARGET")
    refuse_bundle(target, "plan")
    if search and len(plans or ()) > 1:
        raise typer.BadParameter("--search begins from one plan")
    from zgraph.inspection import compare_plans as kinds

    paths: list[Path | None] = list(plans) if plans else [None]
    candidates = {str(path or "the default plan"): with_hardware(load_plan(path), hardware) for path in paths}
    limit = _bytes(budget) if budget is not None else None
    ranks = _ranks(candidates, world)
    loaded_target = load_target(target, batch)
    rows: list[Evaluation] = []
    whole = True
    for name, one in candidates.items():
        with progress(f"evaluating {name}") as say:
            if search:
                with _terminated_as_interrupted():
                    rows, whole = kinds.search(
                        loaded_target.model, loaded_target.inputs, one, ranks, limit or kinds.limit_of(one), say
                    )
            else:
                rows.append(kinds.evaluate(loaded_target.model, loaded_target.inputs, one, ranks, name, limit))
    if not whole:
        so_far = f"the {len(rows)} plan(s) until then are compared" if rows else "no plan had been evaluated"
        typer.echo(f"the search was interrupted: {so_far}", err=True)
        if not rows:
            raise typer.Exit(INTERRUPTED)
    ranked = kinds.ranked(rows)
    best = ranked[0] if ranked[0].fits else None
    data = {"world": ranks, "best": best.name if best else None, "plans": [e.to_json() for e in ranked]}
    give(data, _text(ranked, best, ranks), as_json, None)
    if best is not None and output is not None:
        best.plan.save(output)
        typer.echo(f"wrote {output}{'' if whole else ', the best so far'}", err=True)
    if not whole:
        raise typer.Exit(INTERRUPTED)
    if best is None:
        raise typer.Exit(CHECK_FAILED)


def _convert(
    from_deepspeed: Path | None,
    from_accelerate: Path | None,
    world: int | None,
    model: Any,
    as_json: bool,
    output: Path | None,
) -> None:
    """Print the report on one of two files, and write its plan."""
    if from_deepspeed is not None:
        converted = configuration_report.of_deepspeed(from_deepspeed, world, model, as_json, None)
    else:
        assert from_accelerate is not None
        converted = configuration_report.of_accelerate(from_accelerate, world, model, as_json)
    if output is not None:
        converted.save(output)
        typer.echo(f"wrote {output}", err=True)


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt inside the block, as Ctrl-C is."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _ranks(given: dict[str, Plan], world: int | None) -> int:
    """Return the number of ranks that all plans are compared for. Raises `TargetError` if their meshes have
    different numbers of ranks."""
    if world is not None:
        return world
    worlds = {name: resolve_world(plan, None) for name, plan in given.items()}
    if len(set(worlds.values())) > 1:
        shown = ", ".join(f"{name} for {ranks}" for name, ranks in worlds.items())
        raise TargetError("the plans are for different numbers of ranks", why=shown, hint="--world N")
    return next(iter(worlds.values()))


def _text(ranked: list[Evaluation], best: Evaluation | None, ranks: int) -> str:
    """Return text with a table of the plans, and the best one."""
    staged = any(e.bubble is not None for e in ranked)
    head = ("plan", "step", *(("bubble",) if staged else ()), "exposed", "peak", "of", "fits", "to the best")
    lines = [table(head, [_row(e, best, staged) for e in ranked]), ""]
    where = f"on {ranks} rank(s) of {ranked[0].plan.hardware}"
    lines.append(f"{where}, {best.name} is the fastest that fits" if best else f"{where}, none fits")
    lines += [f"{e.name}: {e.problem}" for e in ranked if e.problem]
    return "\n".join(lines)


def _row(evaluation: Evaluation, best: Evaluation | None, staged: bool) -> tuple[str, ...]:
    """Return the cells of a plan's row; with `staged`, one of them is the pipeline's bubble."""
    bubble = (f"{evaluation.bubble:.1%}" if evaluation.bubble is not None else "",) if staged else ()
    if not evaluation.possible:
        return (evaluation.name, "", *bubble, "", "", shown_bytes(evaluation.limit), "no", "")
    ratio = f"{evaluation.seconds / best.seconds:.2f}" if best and best.seconds else ""
    sizes = shown_bytes(evaluation.peak), shown_bytes(evaluation.limit)
    times = (milliseconds(evaluation.seconds), *bubble, milliseconds(evaluation.exposed))
    return (evaluation.name, *times, *sizes, "yes" if evaluation.fits else "no", ratio)


def _bytes(text: str) -> int:
    from zgraph.errors import PlanError
    from zgraph.plan.communication import parse_bytes

    try:
        size = int(text) if text.isdigit() else parse_bytes(text)
    except PlanError as error:
        raise TargetError(f"{text!r} is no size", where="--budget", hint=error.hint) from error
    if not isinstance(size, int) or size < 1:
        raise TargetError(f"{text!r} is no size", where="--budget", hint='a number and a unit: "20GiB"')
    return size

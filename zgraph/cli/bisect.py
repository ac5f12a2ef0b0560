"""`zgraph bisect`: the first pass that changes what a step computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from zgraph.cli.options import (
    BatchOption,
    HardwareOption,
    JsonOption,
    ModelArgument,
    OutputOption,
    PlanOption,
    WorldOption,
)
from zgraph.cli.output import CHECK_FAILED, give, progress, table
from zgraph.cli.targets import load_plan, load_target, refuse_bundle, resolve_world, with_hardware
from zgraph.cli.verify import batch_of_all

if TYPE_CHECKING:
    from pathlib import Path

    from zgraph.api.bisect_runtime import RuntimeBisection
    from zgraph.inspection.bisect import Bisection, Culprit, Stage
    from zgraph.plan.plan import Plan

SHOWN = 5  # tensors and nodes of a kind, in the text


def bisect(
    target: ModelArgument,
    plan: PlanOption = None,
    world: WorldOption = None,
    hardware: HardwareOption = None,
    batch: BatchOption = None,
    bound: Annotated[
        float | None,
        typer.Option(
            "--bound", metavar="X", min=0.0, help="The relative error that is allowed. [default: by dtype, as verify]"
        ),
    ] = None,
    runtime: Annotated[
        bool,
        typer.Option("--runtime", help="Instead: the first node that differs in compiled code, run on one rank."),
    ] = False,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the first pass that changes numerics: the programs after each pass, on N virtual ranks.

    Exits with 1 if there is one: more than rounding, or a bit that the pass says it keeps. With --runtime it is the first node whose value in
    the code of the plan's backend is not what plain operators give.
    """
    refuse_bundle(target, "bisect")
    the_plan = with_hardware(load_plan(plan), hardware)
    if runtime:
        if world not in (None, 1) or bound is not None:
            raise typer.BadParameter(
                "--runtime is of one rank, with the bounds of dtypes: leave out --world and --bound"
            )
        return _runtime(target, the_plan, batch, output, as_json)
    ranks = resolve_world(the_plan, world)
    loaded_target = load_target(target, batch, weights=True)

    from zgraph.inspection.bisect import bisect as run

    inputs = batch_of_all(loaded_target.inputs, the_plan.data_ranks(ranks))
    with progress(f"running {target} after each pass on {ranks} virtual ranks"):
        bisection = run(loaded_target.model, the_plan, ranks, inputs, bound=bound)
    give(bisection.to_json(), text_of(bisection), as_json, output)
    if not bisection.ok:
        raise typer.Exit(CHECK_FAILED)


def _runtime(target: str, plan: Plan, batch: str | None, output: Path | None, as_json: bool) -> None:
    loaded_target = load_target(target, batch, weights=True)

    from zgraph.api.bisect_runtime import bisect_runtime

    with progress(f"running {target} by the backend {plan.backend}"):
        bisection = bisect_runtime(loaded_target.model, plan, loaded_target.inputs)
    give(bisection.to_json(), text_of_runtime(bisection), as_json, output)
    if not bisection.ok:
        raise typer.Exit(CHECK_FAILED)


def text_of_runtime(bisection: RuntimeBisection) -> str:
    """Return text with the first node that differs in each program."""
    lines = [
        f"{s.program}: {s.node} is the first value that differs: {s.operator} of {s.module or '(root)'} {s.source}".rstrip()
        + f"\n  relative error {s.error:.3g}, allowed {s.allowed:.3g}"
        for s in bisection.suspects
    ]
    said = f"backend {bisection.backend}, programs {', '.join(bisection.programs)}"
    return "\n".join([*lines, said if lines else f"{said}: every value is what plain operators give"])


def text_of(bisection: Bisection) -> str:
    """Return text with the passes to blame, the first in detail, and the result of every pass."""
    where = f"{len(bisection.stages)} programs on {bisection.world} virtual rank(s)"
    lines = [f"{where}: no pass changes numerics"] if bisection.ok else []
    for number, culprit in enumerate(bisection.culprits):
        if number == 0:
            lines += [f"{culprit.name} is the first pass that changes numerics, of {where}", *_at_length(culprit)]
        else:
            lines.append(f"also {culprit.name}, in the {culprit.program}: {_said(culprit)}")
    if bisection.failure is not None:
        lines.append(f"no pass was run after that: {bisection.failure}")
    rows = [(s.program, s.name, _bits(s), _error(s), "" if _ok(s) else "BAD") for s in bisection.stages]
    return "\n".join([*lines, "", table(("program", "pass", "bits", "largest error", ""), rows)])


def _at_length(culprit: Culprit) -> list[str]:
    lines = [f"in the {culprit.program}: {culprit.summary}"]
    if culprit.refused is not None:
        lines += ["", "the verifier refuses what it leaves:", f"  {culprit.refused}"]
    for title, tensors in (
        ("more than rounding:", culprit.beyond),
        ("said to keep bits and did not (against the program before it):", culprit.bits),
    ):
        if tensors:
            lines += ["", title, *(f"  {d}" for d in tensors[:SHOWN])]
            lines += [f"  … {len(tensors) - SHOWN} more"] if len(tensors) > SHOWN else []
    if culprit.changed is None:
        return lines
    for what in ("added", "removed", "moved", "changed"):
        nodes = getattr(culprit.changed, what)
        if nodes:
            shown = [f"  {r.name}  {r.operator}{'  ' + r.of if r.of else ''}" for r in nodes[:SHOWN]]
            lines += ["", f"it {what} {len(nodes)} node(s):" if what != "moved" else f"it moved {len(nodes)}:", *shown]
            lines += [f"  … {len(nodes) - SHOWN} more"] if len(nodes) > SHOWN else []
    return lines


def _said(culprit: Culprit) -> str:
    kinds = [("more than rounding", culprit.beyond), ("said to keep bits and did not", culprit.bits)]
    texts = [f"{what} ({len(tensors)} tensors)" for what, tensors in kinds if tensors]
    return ", ".join([*texts, *(["refused by the verifier"] if culprit.refused is not None else [])])


def _bits(stage: Stage) -> str:
    if stage.kept:
        return "kept"
    return "CHANGED" if stage.said_bitwise else "changed, as it says"


def _error(stage: Stage) -> str:
    return "" if stage.worst is None else f"{stage.worst.error:.3g} (allowed {stage.worst.allowed:.3g})"


def _ok(stage: Stage) -> bool:
    return (stage.kept or not stage.said_bitwise) and (stage.worst is None or stage.worst.ok)

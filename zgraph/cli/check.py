"""`zgraph check`: lists everything that would fail, at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zgraph.cli import configuration_report
from zgraph.cli.options import (
    BatchOption,
    HardwareOption,
    JsonOption,
    OutputOption,
    PlanOption,
    WorldOption,
)
from zgraph.cli.output import CHECK_FAILED, give, progress
from zgraph.cli.targets import DEFAULT_HARDWARE, load_target, on_path, refuse_bundle

if TYPE_CHECKING:
    from torch import nn

    from zgraph.build.planned_step import Inputs
    from zgraph.inspection.check import Checked, Finding

LEVELS = ("error", "warning", "note")


def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A model: package.module:factory, hf:DIR, or an example's name; or a DeepSpeed configuration (.json).",
            show_default=False,
        ),
    ],
    plan: PlanOption = None,
    world: WorldOption = None,
    hardware: HardwareOption = None,
    batch: BatchOption = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a plan against a model, a number of ranks and hardware, and tell everything that would fail at once.

    Of a DeepSpeed configuration it tells what becomes of each key. Exits with 1 if there is an error. Nothing is compiled, and no rank started.
    """
    if target.endswith(".json"):
        configuration_report.of_deepspeed(Path(target), world, None, as_json, output)
        return
    refuse_bundle(target, "check")
    on_path()  # (for passes and policies of the user's)

    from zgraph.inspection.check import check as run

    def find() -> tuple[nn.Module, Inputs]:
        loaded_target = load_target(target, batch)
        return loaded_target.model, loaded_target.inputs

    with progress(f"checking {target}"):
        report = run(find, plan, world, hardware, DEFAULT_HARDWARE)
    give({"target": target, **report.to_json()}, text_of(report), as_json, output)
    if not report.ok:
        raise typer.Exit(CHECK_FAILED)


def text_of(result: Checked) -> str:
    """Return text with the findings, errors first."""
    lines: list[str] = []
    for level in LEVELS:
        for finding in result.findings:
            if finding.level == level:
                lines += _told(finding)
    lines += [f"skipped  {name}: {why}" for name, why in result.skipped.items()]
    counts = ((level, sum(f.level == level for f in result.findings)) for level in LEVELS)
    said = ", ".join(f"{count} {level}{'' if count == 1 else 's'}" for level, count in counts)
    ranks = "" if result.world is None else f" for {result.world} rank(s)"
    return "\n".join([*lines, "", f"{said}{ranks}; well: {', '.join(result.passed) or 'nothing'}"])


def _told(finding: Finding) -> list[str]:
    lines = [f"{finding.level:8} {finding.check}: {finding.what}"]
    for label, text in (("where", finding.where), ("why", finding.why), ("to do", finding.hint)):
        if text:
            first, *rest = text.splitlines()
            lines += [f"{'':8}   {label}: {first}", *(f"{'':8}     {line}" for line in rest)]
    return lines

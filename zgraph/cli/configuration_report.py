"""The reports on other systems' configurations, for the commands that print them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from zgraph.cli.output import CHECK_FAILED, give

if TYPE_CHECKING:
    from zgraph.deepspeed.report import Report
    from zgraph.plan.plan import Plan


def of_deepspeed(path: Path, world: int | None, model: Any, as_json: bool, output: Path | None) -> Plan:
    """Print the report on a DeepSpeed configuration and return its plan. Exits with 1 if a key is refused."""
    from zgraph.deepspeed import report, usual_world

    ranks = world or usual_world(path)
    return _show(report(path, world=ranks, model=model), ranks, as_json, output)


def of_accelerate(path: Path, world: int | None, model: Any, as_json: bool) -> Plan:
    """Print the report on a file of `accelerate config` and return its plan. Exits with 1 if a key is refused."""
    from zgraph.hf.accelerate_config import report

    translated = report(path, world=world, model=model)
    return _show(translated.report, translated.world, as_json, None)


def _show(key_report: Report, ranks: int, as_json: bool, output: Path | None) -> Plan:
    refused = len(key_report.refused)
    summary = (
        f"{refused} of {len(key_report.rows)} keys refused"
        if refused
        else f"all {len(key_report.rows)} keys have their places"
    )
    give({"world": ranks, **key_report.to_json()}, f"{key_report}\n\n{summary}, for {ranks} rank(s)", as_json, output)
    if key_report.plan is None:
        raise typer.Exit(CHECK_FAILED)
    return key_report.plan

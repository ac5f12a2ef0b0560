"""The report on a DeepSpeed configuration, for the commands that print it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from zgraph.cli.output import CHECK_FAILED, give

if TYPE_CHECKING:
    from zgraph.plan.plan import Plan


def show(path: Path, world: int | None, model: Any, as_json: bool, output: Path | None) -> Plan:
    """Print the report on a DeepSpeed configuration and return its plan. Exits with 1 if a key is refused."""
    from zgraph.deepspeed import report, usual_world

    ranks = world or usual_world(path)
    key_report = report(path, world=ranks, model=model)
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

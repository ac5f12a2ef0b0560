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
    found = report(path, world=ranks, model=model)
    refused = len(found.refused)
    says = (
        f"{refused} of {len(found.rows)} keys refused" if refused else f"all {len(found.rows)} keys have their places"
    )
    give({"world": ranks, **found.to_json()}, f"{found}\n\n{says}, for {ranks} rank(s)", as_json, output)
    if found.plan is None:
        raise typer.Exit(CHECK_FAILED)
    return found.plan

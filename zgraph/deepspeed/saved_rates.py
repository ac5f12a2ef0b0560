"""The learning rates that a checkpoint has of an optimizer's groups."""

from __future__ import annotations

from typing import Any

from zgraph.update.resume import Known


def restore_rates(groups: list[dict[str, Any]], known: Known) -> None:
    """Set the rate of each group to the one that the checkpoint has of all its parameters; others stay as they are."""
    saved = {name: group["lr"] for group in known.groups if "lr" in group for name in group.get("names", ())}
    for group in groups:
        rates = {saved.get(name) for name in group["names"]}
        if len(rates) == 1 and None not in rates:
            group["lr"] = rates.pop()

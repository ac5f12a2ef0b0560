"""`zgraph env`: describes the machine, for a bug report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zgraph.cli.options import JsonOption, OutputOption
from zgraph.cli.output import give
from zgraph.units import shown_bytes

if TYPE_CHECKING:
    from zgraph.inspection.environment import Environment


def env(output: OutputOption = None, as_json: JsonOption = False) -> None:
    """Tell what is installed and what the machine has: put it into a report of a bug. Nothing secret is in it."""
    from zgraph.inspection.environment import environment

    report = environment()
    give(report.to_json(), text_of(report), as_json, output)


def text_of(environment: Environment) -> str:
    """Return text that describes the machine, with a line for each fact."""
    lines: list[str] = []
    data = environment.to_json()
    missing = data.pop("missing")
    for title, facts in data.items():
        lines += ["", title]
        width = max((len(_name(key)) for key in facts), default=0)
        lines += [f"  {_name(key):{width}}  {_value(key, value)}" for key, value in facts.items()] or ["  none"]
    lines += ["", "missing" if missing else "nothing is missing"]
    for row in missing:
        lines += [f"  {row['what']}: {row['cost']}", f"    to do: {row['hint']}"]
    return "\n".join(lines[1:])


def _name(key: str) -> str:
    return key.removesuffix("_bytes")


def _value(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{_name(k)} {_value(k, v)}" for k, v in value.items())
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return shown_bytes(value) if key.endswith("_bytes") else str(value)

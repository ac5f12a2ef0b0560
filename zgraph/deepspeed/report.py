"""The report on a DeepSpeed configuration: the verdict on each key."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from zgraph.deepspeed.keys import Verdict
from zgraph.errors import PlanError
from zgraph.plan.plan import Plan

VERDICTS: tuple[Verdict, ...] = ("refused", "applied", "equivalent", "no effect here")


@dataclass(frozen=True)
class Row:
    """The verdict on one key."""

    key: str  # the key ("zero_optimization.stage")
    value: Any  # its value
    verdict: Verdict  # how zgraph treats it
    said: str  # the plan's field and value that it became, why it has no effect, or why it is refused
    hint: str = ""  # what to do about a refused key
    implied: bool = False  # it is a default of DeepSpeed's, and not in the configuration


@dataclass(frozen=True)
class Report:
    """The verdicts on a configuration, and the plan that it makes."""

    rows: tuple[Row, ...]  # one for each key, in the configuration's order
    plan: Plan | None  # the plan; None if a key is refused

    @property
    def refused(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.verdict == "refused")

    def __getitem__(self, key: str) -> Row:
        """Return the row of a key ("zero_optimization.stage"). Raises `KeyError` if there is none."""
        row_of_key = next((row for row in self.rows if row.key == key), None)
        if row_of_key is None:
            raise KeyError(key)
        return row_of_key

    def __str__(self) -> str:
        lines: list[str] = []
        for verdict in VERDICTS:
            for row in self.rows:
                if row.verdict == verdict:
                    value = "(not given)" if row.implied else shown(row.value)
                    lines.append(f"{verdict:14}  {row.key} = {value}: {row.said}")
                    lines += [f"{'':14}    to do: {row.hint}"] if row.hint else []
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the rows and the plan's values as JSON values."""
        rows = [
            {k: v for k, v in asdict(row).items() if v not in ("", False)} | {"value": row.value} for row in self.rows
        ]
        return {"keys": rows, "plan": None if self.plan is None else self.plan.model_dump(mode="json")}

    def require_plan(self) -> Plan:
        """Return the plan. Raises `PlanError` with one problem for each refused key."""
        if self.plan is not None:
            return self.plan
        problems = tuple(
            PlanError(f"{row.key} can't be had: {row.said}", where=row.key, hint=row.hint or None)
            for row in self.refused
        )
        first = problems[0]
        if len(problems) == 1:
            raise first
        others = ", ".join(row.key for row in self.refused[1:])
        error = PlanError(
            first.what, where=first.where, why=f"the first of {len(problems)}; also {others}", hint=first.hint
        )
        error.problems = problems
        raise error


def shown(value: Any) -> str:
    """Return a value as a configuration writes it, cut to 60 characters."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"

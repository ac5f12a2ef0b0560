"""What became of each key of a DeepSpeed configuration."""

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
    """One key: its value, its verdict, and what is said of it: the field and value of the plan that it became, why it has no effect, or why
    it is refused. `hint` says what to do about one that is refused. A key that is `implied` does not stand in the configuration: it is a
    default of DeepSpeed's."""

    key: str
    value: Any
    verdict: Verdict
    said: str
    hint: str = ""
    implied: bool = False


@dataclass(frozen=True)
class Report:
    """The rows of a configuration, in its order, and the plan that they make: None where a key is refused."""

    rows: tuple[Row, ...]
    plan: Plan | None

    @property
    def refused(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.verdict == "refused")

    def __getitem__(self, key: str) -> Row:
        """The row of a key ("zero_optimization.stage"). Raises `KeyError` if there is none."""
        found = next((row for row in self.rows if row.key == key), None)
        if found is None:
            raise KeyError(key)
        return found

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
        """For tools: the rows, and the plan's values."""
        rows = [
            {k: v for k, v in asdict(row).items() if v not in ("", False)} | {"value": row.value} for row in self.rows
        ]
        return {"keys": rows, "plan": None if self.plan is None else self.plan.model_dump(mode="json")}

    def require_plan(self) -> Plan:
        """The plan. Raises `PlanError` with one problem for each key that is refused."""
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
    """A value as a configuration has it."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"

"""Building a plan from a configuration, key by key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from zgraph.deepspeed.keys import Verdict
from zgraph.deepspeed.report import Report, Row, shown
from zgraph.errors import PlanError
from zgraph.plan.plan import Plan


@dataclass
class Draft:
    """A plan in the making: a configuration with known keys of the right types, the verdicts so far, and the plan's
    fields so far."""

    config: Mapping[str, Any]  # the configuration
    world: int  # the number of ranks
    rows: dict[str, Row] = field(default_factory=dict)  # the verdicts, by key
    fields: dict[str, Any] = field(default_factory=dict)  # the plan's fields, nested as its records are
    origins: dict[str, str] = field(default_factory=dict)  # the key that each field ("bucket.gather") comes from

    def get(self, key: str, default: Any = None) -> Any:
        """Return a key's value; the default if it is missing, null or refused already."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None or self.is_refused(key) else value

    def is_refused(self, key: str) -> bool:
        return key in self.rows and self.rows[key].verdict == "refused"

    def say(self, key: str, verdict: Verdict, said: str, hint: str = "") -> None:
        """Record the verdict on a key, unless it is refused already."""
        if not self.is_refused(key):
            self.rows[key] = Row(key, self.get(key), verdict, said, hint, implied=not self._is_given(key))

    def _is_given(self, key: str) -> bool:
        *outer, last = key.split(".")
        table: Any = self.config
        for part in outer:
            table = table.get(part) if isinstance(table, Mapping) else None
        return isinstance(table, Mapping) and last in table

    def refuse(self, key: str, why: str, hint: str) -> None:
        self.say(key, "refused", why, hint)

    def apply(self, key: str, name: str, value: Any, note: str = "") -> None:
        """Set a field of the plan ("bucket.gather") from a key, and record that it is applied."""
        table, (*outer, last) = self.fields, name.split(".")
        for part in outer:
            table = table.setdefault(part, {})
        table[last] = value
        self.origins[name] = key
        self.say(key, "applied", f"{name} = {shown(value)}{f': {note}' if note else ''}")

    def given_for(self, name: str) -> str | None:
        """Return the key of the configuration, not a default, that has set a field or a part of it; None if none has."""
        origins = (key for origin, key in self.origins.items() if f"{origin}.".startswith(f"{name}."))
        return next((key for key in origins if self._is_given(key)), None)

    def finish(self) -> Report:
        """Return the report, with the plan unless a key is refused. Keys whose fields `Plan` refuses are refused."""
        plan = None
        if not any(row.verdict == "refused" for row in self.rows.values()):
            try:
                plan = Plan(**self.fields)
                plan.resolve_mesh(self.world)
            except PlanError as error:
                plan = None
                for problem in error.problems or (error,):
                    key = self._key_of(problem.where or "")
                    self.refuse(
                        key, "; ".join(filter(None, (problem.what, problem.why))), problem.hint or "leave it out"
                    )
        order = {key: at for at, key in enumerate(_paths(self.config))}
        rows = sorted(self.rows.values(), key=lambda row: order.get(row.key, len(order)))
        return Report(tuple(rows), plan)

    def _key_of(self, where: str) -> str:
        """Return the key that set the field which an error names."""
        parts = where.split(".")
        for length in range(len(parts), 0, -1):
            name = ".".join(parts[:length])
            origin_key = next(
                (key for origin, key in self.origins.items() if f"{origin}.".startswith(f"{name}.")), None
            )
            if origin_key is not None:
                return origin_key
        return next(iter(self.origins.values()), "the configuration")


def _paths(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in table.items():
        yield prefix + name
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{name}.")

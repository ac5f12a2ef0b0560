"""Reading a file of `accelerate config`, with keys by their full names, and truth values as accelerate reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zgraph.errors import PlanError
from zgraph.hf.accelerate_config.keys import KEYS, PREFIXES
from zgraph.plan import planfile

_TRUTH = {
    **dict.fromkeys(("y", "yes", "t", "true", "on", "1"), True),
    **dict.fromkeys(("n", "no", "f", "false", "off", "0"), False),
}
# Keys that may say "no", which YAML reads as false where it has no quotes.
_MAY_SAY_NO = ("distributed_type", "mixed_precision", "dynamo_config.dynamo_backend")


def read(path: Path) -> dict[str, Any]:
    """Return a file's keys and values. Raises `PlanError` for a file that can't be read, and for a key given twice."""
    try:
        given = planfile.parse(planfile.read(path), path)
    except PlanError as error:
        what = error.what.replace("plan file", "configuration of accelerate")
        raise PlanError(what, where=error.where, why=error.why, hint=error.hint) from None
    old = given.pop("dynamo_backend", None)  # (before accelerate 0.16)
    if old is not None:
        given["dynamo_config"] = {"dynamo_backend": old, **(given.get("dynamo_config") or {})}
    return {name: _section(str(name), value) for name, value in given.items()}


def truth(value: Any) -> Any:
    """Return whether a text means true or false, as accelerate has it; what is no such text is returned as it is."""
    return _TRUTH.get(value.lower(), value) if isinstance(value, str) else value


def _section(name: str, values: Any) -> Any:
    if not isinstance(values, Mapping):
        return _value(name, values)
    prefix = PREFIXES.get(name, "")
    section: dict[str, Any] = {}
    for given, value in values.items():
        key = str(given) if str(given).startswith(prefix) else f"{prefix}{given}"
        if key in section:
            raise PlanError(f"{key!r} is given twice", where=f"{name}.{given}", hint="keep one of them")
        section[key] = _value(f"{name}.{key}", value)
    return section


def _value(key: str, value: Any) -> Any:
    known = KEYS.get(key)
    if known is not None and known.kind == "bool":
        return truth(value)
    if key in _MAY_SAY_NO and value is False:
        return "no"
    if known is not None and known.kind == "int" and isinstance(value, str) and value.lstrip("-").isdigit():
        return int(value)
    return value

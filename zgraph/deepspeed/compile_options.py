"""What the arguments of `engine.compile` become: those of torch.compile, and of DeepSpeed's own compiler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zgraph.deepspeed.report import Row
from zgraph.errors import UnsupportedError
from zgraph.names import did_you_mean

_BACKENDS = ("inductor", "eager")
_EQUIVALENT = {
    "fullgraph": "a model is captured whole, or refused",
    "compiled_autograd_enabled": "the backward is compiled",
}
_NO_EFFECT = {
    "mode": "kernels are chosen as the plan's backend does; the numbers are the same",
    "schedule": "the plan's passes are one list for all steps: passes in the section zgraph of the configuration adds some",
}
_REFUSED = {
    "disable": ("every step is a program", 'backend="eager" runs it operator by operator'),
    "options": ("Inductor runs by options of zgraph's own, which its order of collectives needs", "leave it out"),
}
_KNOWN = ("dynamic", *_EQUIVALENT, *_NO_EFFECT, *_REFUSED)


def fields_of(backend: Any, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[Row]]:
    """Return the fields of a plan that the arguments set, and a row of the report for each argument that asks for anything.

    `options` are arguments of torch.compile and of `engine.compile` by name. Raises `UnsupportedError` for a backend of torch's or of the script's
    own, and for options that a plan has not.
    """
    if backend not in _BACKENDS:
        raise UnsupportedError(
            f"engine.compile(backend={backend!r}) is not supported",
            why="a plan's programs have collectives, which other compilers do not order",
            hint=did_you_mean(backend, _BACKENDS) if isinstance(backend, str) else '"inductor" or "eager"',
        )
    fields: dict[str, Any] = {"backend": backend}
    rows = [Row("engine.compile(backend)", backend, "applied", f"backend = {backend}")]
    for name, value in options.items():
        if name not in _KNOWN:
            raise UnsupportedError(f"engine.compile has no option {name!r}", hint=did_you_mean(name, _KNOWN))
        if (not value and not (name == "dynamic" and value is False)) or (name == "mode" and value == "default"):
            continue  # (it asks for nothing)
        key = f"engine.compile({name})"
        if name in _REFUSED:
            why, hint = _REFUSED[name]
            raise UnsupportedError(f"engine.compile({name}={value!r}) is not supported", why=why, hint=hint)
        if name == "dynamic":
            fields["shapes"] = "dynamic" if value else "static"
            rows.append(Row(key, value, "applied", f"shapes = {fields['shapes']}"))
        elif name in _EQUIVALENT:
            rows.append(Row(key, value, "equivalent", _EQUIVALENT[name]))
        else:
            rows.append(Row(key, value, "no effect here", _NO_EFFECT[name]))
    return fields, rows

"""The memory of a step: the peak, the values alive at it, and the curve over the step, by category and by module."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from zgraph.errors import PlanError, TargetError
from zgraph.inspection.inspection import Inspection, PassTrace
from zgraph.names import did_you_mean
from zgraph.passes.analysis.live_memory import CATEGORIES, Life
from zgraph.passes.analysis.simulator import Forecast
from zgraph.plan.communication import parse_bytes
from zgraph.program.node import info, value
from zgraph.program.printer import type_text

HELD = "held besides"  # optimizer states and waiting gradients, while forward and backward run
HOLDERS = 20  # tensors that a peak lists at most, by default


@dataclass(frozen=True)
class Holder:
    """One tensor that is alive at the peak."""

    node: str  # the node that makes it
    type: str  # its dtype and shape, as text
    category: str  # its category of memory
    bytes: int  # its size
    module: str  # the module that it belongs to
    source: str  # the user's "file:line"; "" if unknown
    born: int  # the position of the program at which it is allocated
    gone: int  # the position at which it is free again


@dataclass(frozen=True)
class Peak:
    """The most bytes of the device that a step has in use."""

    program: str  # the program that reaches it
    node: str  # the node that reaches it
    position: int  # the node's position in the program
    seconds: float  # the time since the program's start
    bytes: int  # all bytes in use
    categories: dict[str, int]  # bytes by category, the largest first
    modules: dict[str, int]  # bytes by module, the largest first
    holders: tuple[Holder, ...]  # the largest tensors


def peak_of(inspection: Inspection, count: int = HOLDERS, category: str | None = None) -> Peak:
    """Return the peak of a step, or of one `category` of its memory, with the `count` largest tensors alive at it (of
    that category)."""
    peaks = [(total_at(way, forecast, category), way, forecast) for way, forecast in inspection.forecasts()]
    (size, position), way, forecast = max(peaks, key=lambda f: f[0][0])
    node = way.last.program.nodes[position]
    live = [life for life in inspection.lives(way) if life.born <= position < life.gone and life.bytes]
    live = [life for life in live if category in (None, life.category)]
    live.sort(key=lambda life: (-life.bytes, life.born))
    modules: Counter[str] = Counter()
    for life in live:
        modules[owner(life)] += life.bytes
    sizes = forecast.memory[position] if forecast.memory else {}
    besides = {HELD: way.held} if way.held and category in (None, HELD) else {}
    wanted = {name: size for name, size in sizes.items() if category in (None, name)}
    return Peak(
        way.name,
        node.name,
        position,
        forecast.clock[position],
        size,
        _sorted({**wanted, **besides}),
        _sorted({**modules, **besides}),
        tuple(holder_of(life) for life in live[:count]),
    )


def total_at(way: PassTrace, forecast: Forecast, category: str | None = None) -> tuple[int, int]:
    """Return (the most bytes in use while a program runs, with those held besides, or the most of one category; the
    first position that reaches them)."""
    if category == HELD:
        return way.held, 0
    sizes = [sum(at.values()) if category is None else at.get(category, 0) for at in forecast.memory]
    most = max(sizes, default=0)
    return most + (way.held if category is None else 0), sizes.index(most) if sizes else 0


def owner(life: Life) -> str:
    """Return the module that a value belongs to: that of its parameter, or the one that made it."""
    record = info(life.node)
    if record.param:
        return record.param.rpartition(".")[0] or "(root)"
    return record.module or "(root)"


def holder_of(life: Life) -> Holder:
    record = info(life.node)
    shown = type_text(value(life.node))
    return Holder(life.node.name, shown, life.category, life.bytes, owner(life), record.source, life.born, life.gone)


def data_of(inspection: Inspection) -> dict[str, Any]:
    """Return the forecast of the memory as JSON."""
    peak = peak_of(inspection)
    programs = [
        {
            "name": way.name,
            "kind": way.kind,
            "held": way.held,
            "peak": total_at(way, forecast)[0],
            "curve": [sum(at.values()) + way.held for at in forecast.memory],
        }
        for way, forecast in inspection.forecasts()
    ]
    measured = inspection.measured.get("peak")
    return {"world": inspection.world, "peak": asdict(peak), "measured": measured, "programs": programs}


# -- assertions ---------------------------------------------------------------------------------------------------------
_ASSERTION = re.compile(r"\s*([a-z ]+?)\s*(<=|<)\s*(.+?)\s*$")


@dataclass(frozen=True)
class Bound:
    """A bound on the peak, or on the peak of one category: "peak<=72GiB"."""

    what: str  # "peak", or a category
    strict: bool  # whether the bound is "<" rather than "<="
    bytes: int  # the bytes that it allows

    @property
    def category(self) -> str | None:
        """The category that it is about; None for all of them."""
        return None if self.what == "peak" else self.what

    def holds(self, size: int) -> bool:
        return size < self.bytes if self.strict else size <= self.bytes


def parse_bound(text: str) -> Bound:
    """Parse a bound: "peak<=72GiB", "activations < 10 GB". Raises `TargetError` for anything else, and for an unknown
    category."""
    hint = "'peak<=72GiB', or a category: 'activations<=10GiB'"
    match = _ASSERTION.match(text)
    if match is None:
        raise TargetError(f"{text!r} is no bound on memory", hint=hint)
    try:
        size = int(match[3]) if match[3].isdigit() else parse_bytes(match[3])
    except PlanError as error:
        raise TargetError(f"{text!r} is no bound on memory", why=error.what, hint=hint) from error
    if not isinstance(size, int):
        raise TargetError(f"{text!r} is no bound on memory", why=f"{match[3]!r} is no size", hint=hint)
    if match[1] not in (known := ("peak", *CATEGORIES, HELD)):
        raise TargetError(f"there is no category {match[1]!r}", hint=did_you_mean(match[1], known))
    return Bound(match[1], match[2] == "<", size)


def _sorted(sizes: dict[str, int]) -> dict[str, int]:
    return dict(sorted(((k, v) for k, v in sizes.items() if v), key=lambda i: -i[1]))

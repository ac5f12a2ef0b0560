"""The data that the page's scripts read, in a compact form: every program after every pass, and the forecasts of the
finished ones.

Passes change little, and variants of a program share most of it. So a line of a program's text is stored once, with
what is known of its node (a *row*; its columns are lists of numbers, which for texts are positions in one list of
strings). A program after a pass is then a list of runs over rows: [first row, number of rows, first row, …]. Times are
in nanoseconds, positions of nodes are those in the graph.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable
from typing import Any

from torch import fx

from zgraph.inspection.diff import compare
from zgraph.inspection.inspection import Inspection, PassTrace
from zgraph.inspection.memory import HELD
from zgraph.inspection.page.parameters import parameters_of
from zgraph.inspection.snapshot import Snapshot
from zgraph.passes.analysis.costs import size_of
from zgraph.passes.analysis.simulator import Forecast, simulate
from zgraph.program.node import has_info, info, value
from zgraph.program.printer import lines, operator_text, type_text
from zgraph.program.program import Program

# The columns of rows that are texts, besides the line itself.
TEXTS = (
    "name",
    "operator",
    "type",
    "phase",
    "role",
    "module",
    "source",
    "param",
    "mesh_dim",
    "made_by",
    "copy_of",
    "bucket",
    "group",
    "home",
)


def pack(data: dict[str, Any]) -> str:
    """Return JSON as compressed text of letters that need no escaping. The same data always gives the same text."""
    raw = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    return base64.b64encode(gzip.compress(raw, 6, mtime=0)).decode("ascii")


def unpack(text: str) -> dict[str, Any]:
    """Return the data that `pack` has packed."""
    return json.loads(gzip.decompress(base64.b64decode(text)))  # type: ignore[no-any-return]


def data_of(inspection: Inspection) -> dict[str, Any]:
    """Return all programs of an inspection with their forecasts: those of the step by `Inspection.forecast`, others
    simulated alone."""
    rows = _Rows()
    forecasts = {way.name: forecast for way, forecast in inspection.forecasts()}
    update = inspection.update
    programs = []
    for way in inspection.ways.values():
        forecast = forecasts.get(way.name) or simulate(way.last.program, inspection.costs)
        programs.append(
            {
                "name": way.name,
                "kind": way.kind,
                "held": way.held,
                "passes": [_pass(way, at, rows) for at in range(len(way.snapshots))],
                "order": runs(rows.of(node, "") for node in way.last.program.graph.nodes),
                "forecast": _forecast(forecast, way.last.program),
                "memory": _lives(inspection, way),
                "parameters": parameters_of(way.last.program, update.last.program if update else None),
                "remarks": way.remarks,
            }
        )
    return {
        "strings": rows.strings,
        "rows": rows.columns(),
        "programs": programs,
        "held": HELD,
        "main": inspection.way().name,
    }


def runs(numbers: Iterable[int]) -> list[int]:
    """Encode numbers that mostly count up as [first, count, first, count, …]."""
    pairs: list[int] = []
    for number in numbers:
        if pairs and pairs[-2] + pairs[-1] == number:
            pairs[-1] += 1
        else:
            pairs += [number, 1]
    return pairs


class _Rows:
    """Every line of every program, each stored once. The output node, which has a position but no line of its own, is a
    row too."""

    def __init__(self) -> None:
        self.strings: list[str] = []
        self._strings: dict[str, int] = {}
        self._rows: dict[tuple[Any, ...], int] = {}
        self._lines: dict[fx.Node, str] = {}
        self.string("")  # (0 is "nothing")

    def string(self, text: str | None) -> int:
        text = text or ""
        if text not in self._strings:
            self._strings[text] = len(self.strings)
            self.strings.append(text)
        return self._strings[text]

    def program(self, program: Program) -> list[int]:
        """Return the rows of a program's text."""
        rows = []
        for text, node in lines(program):
            if node is not None:
                self._lines[node] = text
            rows.append(self._place((text,)) if node is None else self.of(node, text))
        return rows

    def of(self, node: fx.Node, text: str) -> int:
        """Return the row of a node with this line; for "" with the line that it had in its program."""
        return self._place((text or self._lines.get(node, ""), *self._record(node)))

    def columns(self) -> dict[str, list[Any]]:
        """Return the rows by column. A row without a node is empty in all columns but "text"."""
        empty = (0,) * len(TEXTS) + (0, False, ())
        whole = [row if len(row) > 1 else (*row, *empty) for row in self._rows]
        names = ("text", *TEXTS, "bytes", "ahead", "operands")
        return {name: list(column) for name, column in zip(names, zip(*whole, strict=True), strict=True)}

    def _place(self, row: tuple[Any, ...]) -> int:
        return self._rows.setdefault(row, len(self._rows))

    def _record(self, node: fx.Node) -> tuple[Any, ...]:
        shown = type_text(value(node)) if "val" in node.meta and node.op != "output" else ""
        operands = tuple(self.string(a.name) for a in node.all_input_nodes)
        texts = [node.name, operator_of(node), shown]
        if not has_info(node):
            return (*map(self.string, texts), *(0 for _ in TEXTS[3:]), 0, False, operands)
        record = info(node)
        texts += [getattr(record, name) for name in TEXTS[3:]]
        size = size_of(node) if node.op != "output" else 0
        return (*map(self.string, texts), size, record.ahead, operands)


def operator_of(node: fx.Node) -> str:
    """Return the operator that a node calls; for a node that calls none its kind, such as "placeholder"."""
    return operator_text(node.target) if node.op == "call_function" else str(node.op)


def _pass(way: PassTrace, at: int, rows: _Rows) -> dict[str, Any]:
    """Return what a pass is, the program that it left, and what it changed. (Of nodes in both programs only moved ones
    are listed: the page finds the other changes.)"""
    snapshot = way.snapshots[at]
    facts = {**snapshot.facts, "figures": vars(snapshot.figures), "rows": runs(rows.program(snapshot.program))}
    if not at:
        return facts
    return facts | _changed(way.snapshots[at - 1], snapshot, rows)


def _changed(before: Snapshot, after: Snapshot, rows: _Rows) -> dict[str, Any]:
    difference = compare(before, after, simulate=False)
    counts = {what: len(getattr(difference, what)) for what in ("added", "removed", "moved", "changed")}
    return {
        "changed": counts,
        "bytes": dict(zip(("removed", "added"), difference.bytes, strict=True)),
        "moved": [rows.string(row.name) for row in difference.moved],
    }


def _forecast(forecast: Forecast, program: Program) -> dict[str, Any]:
    at = {node.name: i for i, node in enumerate(program.graph.nodes)}
    lanes = list(dict.fromkeys(span.lane for span in forecast.spans))
    spans = [(at[s.node], lanes.index(s.lane), _ns(s.start), _ns(s.seconds)) for s in forecast.spans]
    clock = [_ns(seconds) for seconds in forecast.clock]
    return {
        "seconds": forecast.seconds,
        "exposed": forecast.exposed,
        "lanes": lanes,
        "spans": [list(column) for column in zip(*spans, strict=True)] if spans else [[], [], [], []],
        "stalls": [[at[s.node], s.role.value, _ns(s.seconds)] for s in forecast.stalls],
        "clock": [now - before for before, now in zip([0, *clock], clock, strict=False)],  # (differences are small)
    }


def _lives(inspection: Inspection, way: PassTrace) -> dict[str, Any]:
    """Return the values that take memory: each one's position in the graph, category, bytes, and first and last
    position."""
    lives = [life for life in inspection.lives(way) if life.bytes]
    at = {node: i for i, node in enumerate(way.last.program.graph.nodes)}
    categories = list(dict.fromkeys(life.category for life in lives))
    rows = [(at[life.node], categories.index(life.category), life.bytes, life.born, life.gone) for life in lives]
    columns = [list(column) for column in zip(*rows, strict=True)] if rows else [[], [], [], [], []]
    return {"categories": categories, "lives": columns}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)

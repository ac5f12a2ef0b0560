"""Compare the simulated step with a PyTorch profile of a real run, node by node.

A run marks each of its programs in a profile ("zgraph:train0.forward"). Inside such a range the operators that ran are
in the program's order, so the n-th `aten::mm` is the n-th node that calls it. What Inductor fused has no operator of
its own in a profile: the time of a range that no operator took is compared with all of its other nodes together.
Operators that the program lacks are reported. On CUDA an operator's time is that of the kernels that it launched. Times
are medians over the runs that the profile has.
"""

from __future__ import annotations

import bisect
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from torch import fx

from zgraph.errors import TargetError
from zgraph.inspection.inspection import Inspection, PassTrace
from zgraph.passes.analysis.costs import computes
from zgraph.passes.analysis.simulator import Forecast
from zgraph.program import collectives
from zgraph.program.node import Phase, info
from zgraph.units import milliseconds

_RANGE = re.compile(r"zgraph:([a-z]+)\d*(?:\.\d+)?(?:\.(forward|backward|ahead\d*|\d+))?$")
_CALL = "## Call CompiledFxGraph"
_QUIET = {
    f"aten::{name}"
    for name in ("t", "transpose", "view", "reshape", "expand", "as_strided", "empty", "empty_strided", "detach")
}


@dataclass(frozen=True)
class Row:
    """A node, or all nodes of a range that have no operator of their own in the profile, taken together."""

    node: str  # the node's name, or a text for several
    operator: str  # its operator as the profile calls it; "" for several
    module: str  # its module; "" for several
    forecast: float  # seconds by the simulation
    measured: float  # median seconds in the profile
    fused: int = 0  # how many nodes are taken together; 0 for a single node


@dataclass(frozen=True)
class Comparison:
    """A simulated step compared with a profile."""

    rows: tuple[Row, ...]  # all rows
    ranges: tuple[tuple[str, float, float, int], ...]  # (name, seconds forecast, seconds measured, runs) of each range
    # runs of operators beyond the program's nodes of them; many mean that the profile is of another program
    strange: dict[str, int]

    def __str__(self) -> str:
        alone, fused = sum(not row.fused for row in self.rows), sum(row.fused for row in self.rows)
        lines = [f"{alone} nodes are in the profile; {fused} others are taken together, by range"]
        if self.strange:
            shown = ", ".join(f"{name} ({count} times)" for name, count in list(self.strange.items())[:5])
            lines.append(f"in the profile, and not in the programs: {shown}: is it of this model and plan?")
        lines += [
            f"{name}: forecast {milliseconds(ahead)}, measured {milliseconds(took)}"
            f"{f' ({took / ahead:.2f} times)' if ahead else ''}, {runs} run(s)"
            for name, ahead, took, runs in self.ranges
        ]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        keys = ("name", "forecast", "measured", "runs")
        return {
            "rows": [asdict(row) for row in self.rows],
            "ranges": [dict(zip(keys, row, strict=True)) for row in self.ranges],
            "strange": self.strange,
        }


@dataclass(frozen=True)
class _Run:
    """One run of a program in a profile."""

    seconds: float  # how long the range took
    operators: list[tuple[str, float]]  # (operator, seconds) of what ran directly in it


def beside(inspection: Inspection, profile: dict[str, Any]) -> Comparison:
    """Compare a step with a profile (a Chrome trace of `torch.profiler`). Raises `TargetError` if no program of zgraph
    ran in it."""
    runs = _runs([e for e in profile["traceEvents"] if e.get("ph") == "X" and "dur" in e])
    if not runs:
        raise TargetError(
            "the profile has no program of zgraph",
            why="no range in it is called zgraph:…",
            hint="profile a few steps of the compiled model, behind the first",
        )
    rows: list[Row] = []
    ranges: list[tuple[str, float, float, int]] = []
    strange: Counter[str] = Counter()
    for name, program_runs in runs.items():
        nodes, forecast = _nodes(inspection, name)
        if not nodes or forecast is None:
            continue
        expected = _expected(nodes, forecast)
        rows += _rows(name, nodes, expected, program_runs)
        ranges.append(
            (name, sum(expected.values()), statistics.median(r.seconds for r in program_runs), len(program_runs))
        )
        strange += _strange(nodes, program_runs[0])
    return Comparison(tuple(rows), tuple(ranges), dict(strange.most_common()))


# -- the profile ------------------------------------------------------------------------------------------------------------
def _runs(events: list[dict[str, Any]]) -> dict[str, list[_Run]]:
    """Return the runs of each of zgraph's programs, by their range's name."""
    by_thread: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("cpu_op", "user_annotation"):
            by_thread[event.get("pid"), event.get("tid")].append(event)
    kernels = _launches(events)
    runs: dict[str, list[_Run]] = defaultdict(list)
    for thread, own_events in by_thread.items():
        own_events.sort(key=lambda e: (e["ts"], -e["dur"]))
        starts = [e["ts"] for e in own_events]
        for at, event in enumerate(own_events):
            if event.get("cat") != "user_annotation" or not _RANGE.match(event["name"]):
                continue
            end = event["ts"] + event["dur"]
            inside = own_events[at + 1 : bisect.bisect_left(starts, end)]
            runs[event["name"].removeprefix("zgraph:")].append(_run(event, inside, kernels.get(thread)))
    return _joined(runs)


def _joined(runs_by_name: dict[str, list[_Run]]) -> dict[str, list[_Run]]:
    """Join the chunks that an update runs in ("update0.0", "update0.1", …): the n-th run of each is part of the n-th
    run of the whole."""
    joined: dict[str, list[_Run]] = {}
    chunks: dict[str, list[tuple[int, list[_Run]]]] = defaultdict(list)
    for name, runs in runs_by_name.items():
        whole, _, number = name.rpartition(".")
        if number.isdigit() and whole:
            chunks[whole].append((int(number), runs))
        else:
            joined[name] = runs
    for whole, parts in chunks.items():
        parts.sort(key=lambda part: part[0])
        joined[whole] = [
            _Run(sum(r.seconds for r in one), [operator for r in one for operator in r.operators])
            for one in zip(*(runs for _, runs in parts), strict=False)
        ]
    return joined


def _launches(events: list[dict[str, Any]]) -> dict[Any, list[tuple[float, float]]]:
    """Return (when it was launched, microseconds on the device) of each kernel, in order, by the thread that launched
    it."""
    durations: dict[Any, float] = defaultdict(float)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            durations[event.get("args", {}).get("correlation")] += event["dur"]
    launches: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            correlation = event.get("args", {}).get("correlation")
            if correlation in durations:
                launches[event.get("pid"), event.get("tid")].append((event["ts"], durations[correlation]))
    return {thread: sorted(launched) for thread, launched in launches.items()}


def _run(event: dict[str, Any], inside: Iterable[dict[str, Any]], kernels: list[tuple[float, float]] | None) -> _Run:
    """Return a run with the operators that ran directly in the range. Ranges within it and the call of compiled code
    are looked into, operators are not."""
    operators: list[tuple[str, float]] = []
    until = 0.0
    for one in inside:
        if one.get("cat") != "cpu_op" or one["name"].startswith(_CALL) or one["ts"] < until:
            continue
        until = one["ts"] + one["dur"]
        operators.append((one["name"], _seconds(one, kernels)))
    return _Run(_seconds(event, kernels), operators)


def _seconds(event: dict[str, Any], kernels: list[tuple[float, float]] | None) -> float:
    """Return the seconds that an event took: those of the kernels that it launched, if there are any in its thread."""
    if kernels is None:
        return float(event["dur"]) / 1e6
    first = bisect.bisect_left(kernels, (event["ts"], 0.0))
    last = bisect.bisect_right(kernels, (event["ts"] + event["dur"], float("inf")))
    return sum(lasted for _, lasted in kernels[first:last]) / 1e6


# -- the program ------------------------------------------------------------------------------------------------------------
def _nodes(inspection: Inspection, name: str) -> tuple[list[fx.Node], Forecast | None]:
    """Return the nodes that ran in a range of this name, and the forecast of their program."""
    for way, forecast in inspection.forecasts():
        part = _part(way, name)
        if part is None:
            continue
        phase = {"forward": Phase.FORWARD, "backward": Phase.BACKWARD}.get(part)
        ahead = part.startswith("ahead")
        wanted = [
            n
            for n in way.last.program.graph.nodes
            if n.op == "call_function" and (phase is None or info(n).phase is phase) and info(n).ahead is ahead
        ]
        return wanted, forecast
    return [], None


def _part(way: PassTrace, name: str) -> str | None:
    """Return the part of a program that a range is of ("forward", "backward", "ahead0", "" for the whole); None if it
    is of another program."""
    if name == way.name or name.startswith(f"{way.name}."):
        return name.removeprefix(way.name).removeprefix(".")
    kind, digits = re.match(r"([a-z]+)(\d*)", name).groups()  # type: ignore[union-attr]
    if way.name == kind and digits:  # (an inspection of a model names its program "train", a run "train0")
        return name.removeprefix(kind + digits).removeprefix(".")
    return None


def _expected(nodes: list[fx.Node], forecast: Forecast) -> dict[str, float]:
    """Return the simulated seconds of each node that computes, starts a transfer or waits for one."""
    names = {n.name for n in nodes}
    seconds = {n.name: 0.0 for n in nodes if computes(n) or collectives.is_start(n) or collectives.is_wait(n)}
    for span in forecast.spans:
        if span.lane in ("compute", "host") and span.node in names:
            seconds[span.node] = seconds.get(span.node, 0.0) + span.seconds
    for stall in forecast.stalls:
        if stall.node in names:
            seconds[stall.node] = seconds.get(stall.node, 0.0) + stall.seconds
    return seconds


def _strange(nodes: list[fx.Node], run: _Run) -> Counter[str]:
    """Count the runs of each operator that exceed the nodes that call it. (Views and allocations are left out: programs
    lack or fold them.)"""
    ran = Counter(operator for operator, _ in run.operators)
    known = Counter(_event_name(node) for node in nodes)
    quiet = {_event_name(n) for n in nodes if not computes(n)} | _QUIET
    return Counter(
        {name: count - known[name] for name, count in ran.items() if count > known[name] and name not in quiet}
    )


def _rows(name: str, nodes: list[fx.Node], expected: dict[str, float], runs: list[_Run]) -> list[Row]:
    """Return a row for each node with an operator in the profile, and one for the rest of the nodes and the rest of the
    range's time."""
    by_operator: dict[str, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        by_operator[_event_name(node)].append(node)
    measured: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        counts: dict[str, int] = defaultdict(int)
        for operator, seconds in run.operators:
            same = by_operator.get(operator, ())
            if counts[operator] < len(same):
                measured[same[counts[operator]].name].append(seconds)
            counts[operator] += 1
    medians = {node: statistics.median(times) for node, times in measured.items()}
    rows = [
        Row(n.name, _event_name(n), info(n).module, expected[n.name], medians[n.name])
        for n in nodes
        if n.name in expected and n.name in medians
    ]
    rest = [n for n in nodes if n.name in expected and n.name not in medians]
    if rest:
        left = statistics.median(max(0.0, run.seconds - sum(t for _, t in run.operators)) for run in runs)
        ahead = sum(expected[n.name] for n in rest)
        rows.append(Row(f"({len(rest)} others of {name})", "", "", ahead, left, len(rest)))
    return rows


def _event_name(node: fx.Node) -> str:
    """Return the name that a profile has for a node's operator: "aten::mm"."""
    schema = getattr(node.target, "_schema", None)
    return str(schema.name) if schema is not None else str(node.target)

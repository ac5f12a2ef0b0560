"""The simulated step as a trace for Perfetto and chrome://tracing.

The format is Google's "Trace Event Format": a process for each rank, a thread for each lane (compute, each link, copy
engines, disk, host), complete events in microseconds, counters for the live bytes by category, and flow arrows from the
transfer of a gathered weight to the node that reads it first. Every rank runs the same program, so ranks differ only in
their number.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from zgraph.inspection.inspection import UPDATE, Inspection, PassTrace
from zgraph.inspection.memory import HELD
from zgraph.passes.analysis.costs import computes
from zgraph.passes.analysis.simulator import Forecast
from zgraph.program.node import Role, info, value
from zgraph.program.printer import type_text


def trace_of(inspection: Inspection, ranks: int = 1) -> dict[str, Any]:
    """Return the trace of the first `ranks` ranks. If gathers start before the step, the trace begins with the update
    before it."""
    events: list[dict[str, Any]] = []
    lanes: dict[str, int] = {"compute": 1}
    begins = max(0.0, -min((s.start for _, f in inspection.forecasts() for s in f.spans), default=0.0))
    origin = begins
    if begins:
        before = {"ph": "X", "name": "the update of the step before", "cat": "before", "tid": 1, "ts": 0.0}
        events.append({**before, "dur": _us(begins)})
    for (way, forecast), (_, runs) in zip(inspection.forecasts(), inspection.forecast.times(), strict=True):
        beside = inspection.late and way.kind == UPDATE
        for run in range(runs):
            suffix = f" ({run + 1} of {runs})" if runs > 1 else ""
            at = origin if beside else begins
            events += _program(way, forecast, at, lanes, way.name + suffix, " of the late update" if beside else "")
            begins += 0.0 if beside else forecast.seconds
    rank_events = [{**event, "pid": rank} for rank in range(ranks) for event in _names(rank, lanes) + events]
    for event in rank_events:
        if "id" in event:
            event["id"] = f"{event['pid']}.{event['id']}"
    head = {"of": inspection.origin, "world": inspection.world, "hardware": inspection.hardware.get("name", "")}
    return {"traceEvents": rank_events, "displayTimeUnit": "ms", "otherData": head}


def _names(rank: int, lanes: dict[str, int]) -> list[dict[str, Any]]:
    names = [{"ph": "M", "name": "process_name", "tid": 0, "args": {"name": f"rank {rank}"}}]
    for lane, tid in lanes.items():
        names.append({"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": lane}})
        names.append({"ph": "M", "name": "thread_sort_index", "tid": tid, "args": {"sort_index": tid}})
    return names


def _program(
    way: PassTrace, forecast: Forecast, begins: float, lanes: dict[str, int], category: str, of: str
) -> list[dict[str, Any]]:
    """Return the events of one run of a program, which begins `begins` seconds after the trace. `of`: a suffix for its
    lanes' names, if they are not the step's."""
    nodes = list(way.last.program.graph.nodes)
    by_name = {node.name: node for node in nodes}
    ends = {node.name: clock for node, clock in zip(nodes, forecast.clock, strict=True)}
    computed = {span.node: span for span in forecast.spans if span.lane == "compute"}
    events: list[dict[str, Any]] = []
    for span in forecast.spans:
        tid = _lane(lanes, span.lane + of)
        node = by_name[span.node]
        start, duration = _us(begins + span.start), _us(span.seconds)
        event = {"ph": "X", "name": span.node, "cat": category, "tid": tid, "ts": start, "dur": duration}
        events.append({**event, "args": _about(node)})
        reader = first_reader(node) if span.lane.startswith("link:") and info(node).role is Role.GATHER else None
        if reader is not None and reader.name in computed:
            both = {"name": "gathered", "cat": "gather", "id": f"{category}.{span.node}"}
            events.append({**both, "ph": "s", "tid": tid, "ts": start + duration})
            reads = _us(begins + computed[reader.name].start)
            events.append({**both, "ph": "f", "bp": "e", "tid": _lane(lanes, "compute" + of), "ts": reads})
    for stall in forecast.stalls:
        event = {
            "ph": "X",
            "name": f"waits for {stall.role.value}",
            "cat": "exposed",
            "tid": _lane(lanes, stall.lane + of),
        }
        when = {"ts": _us(begins + ends[stall.node] - stall.seconds), "dur": _us(stall.seconds)}
        events.append({**event, **when, "args": {"node": stall.node}})
    return [*events, *([] if of else _counters(way, forecast, begins))]


def _lane(lanes: dict[str, int], name: str) -> int:
    return lanes.setdefault(name, len(lanes) + 1)


def first_reader(start: fx.Node) -> fx.Node | None:
    """Return the first node that computes with what a transfer brings, through its wait, views and members of tuples;
    None if none does."""
    seen = {start}
    node = start.next
    while node.op != "root":
        if seen.intersection(node.all_input_nodes):
            if computes(node) or node.op == "output":
                return node if node.op != "output" else None
            seen.add(node)
        node = node.next
    return None


def _counters(way: PassTrace, forecast: Forecast, begins: float) -> list[dict[str, Any]]:
    """Return counter events of the live bytes by category, wherever they change."""
    categories = dict.fromkeys(category for at in forecast.memory for category in at)
    counters: list[dict[str, Any]] = []
    shown: dict[str, int] | None = None
    for clock, at in zip(forecast.clock, forecast.memory, strict=True):
        now = {category: at.get(category, 0) for category in categories}
        if way.held:
            now[HELD] = way.held
        if now != shown:
            counters.append(
                {"ph": "C", "name": "bytes", "cat": way.name, "tid": 0, "ts": _us(begins + clock), "args": now}
            )
            shown = now
    return counters


def _about(node: fx.Node) -> dict[str, Any]:
    record = info(node)
    about = {
        "type": type_text(value(node)),
        "operator": str(node.target),
        "phase": record.phase.value,
        "role": record.role.value,
        "module": record.module,
        "source": record.source,
        "param": record.param,
        "made_by": record.made_by,
    }
    return {key: text for key, text in about.items() if text}


def _us(seconds: float) -> float:
    return seconds * 1e6

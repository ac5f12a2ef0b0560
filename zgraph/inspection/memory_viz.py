"""The forecast of the memory as a snapshot that PyTorch's memory visualiser opens (https://pytorch.org/memory_viz).

The format is that of `torch.cuda.memory._snapshot()`: a trace of allocations and frees, each with its address, bytes,
time and frames. A value's frames are its module and the user's line; addresses are made up so that no two living values
overlap.
"""

from __future__ import annotations

import bisect
import pickle
from typing import Any

from zgraph.inspection.inspection import UPDATE, Inspection, PassTrace
from zgraph.inspection.memory import HELD, owner
from zgraph.passes.analysis.live_memory import Life
from zgraph.passes.analysis.simulator import Forecast
from zgraph.program.node import info

ALIGN = 512  # bytes, as torch's allocator rounds


def pickle_of(inspection: Inspection) -> bytes:
    """Return the snapshot, pickled as the visualiser reads it: plain dicts, lists, strings and numbers."""
    return pickle.dumps(snapshot_of(inspection))


def snapshot_of(inspection: Inspection) -> dict[str, Any]:
    """Return the step's programs, one after another, as a memory snapshot. A program's inputs are allocated at its
    start."""
    events: list[dict[str, Any]] = []
    space = _Space()
    begins = 0.0
    for (way, forecast), (_, runs) in zip(inspection.forecasts(), inspection.forecast.times(), strict=True):
        if inspection.late and way.kind == UPDATE:
            continue  # (it runs beside the other programs, whose `held` bytes include it)
        for _ in range(runs):
            events += _program(inspection, way, forecast, begins, space)
            begins += forecast.seconds
    segment = {
        "device": 0,
        "address": _Space.START,
        "total_size": space.end - _Space.START,
        "allocated_size": 0,
        "active_size": 0,
        "requested_size": 0,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [
            {
                "address": _Space.START,
                "size": space.end - _Space.START,
                "requested_size": 0,
                "state": "inactive",
                "frames": [],
            }
        ],
    }
    return {"segments": [segment], "device_traces": [events], "allocator_settings": {}, "external_annotations": []}


def _program(
    inspection: Inspection, way: PassTrace, forecast: Forecast, begins: float, space: _Space
) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    clock = [begins, *(begins + at for at in forecast.clock)]
    changes: list[tuple[int, int, Life]] = []
    for life in inspection.lives(way):
        if life.bytes:
            changes += [(life.born, 1, life), (life.gone, 0, life)]
    changes.sort(key=lambda c: c[:2])  # (at one position frees come before allocations)
    held_address = space.take(way.held)
    if way.held:
        events.append(_event("alloc", held_address, way.held, begins, [_frame(HELD, "", way.name)]))
    at: dict[int, int] = {}
    for position, comes, life in changes:
        when = clock[min(position, len(clock) - 1)]
        if comes:
            at[id(life)] = space.take(life.bytes)
            events.append(_event("alloc", at[id(life)], life.bytes, when, _frames(life, way.name)))
        else:
            address = at.pop(id(life))
            space.give(address, life.bytes)
            events.append(_event("free_requested", address, life.bytes, when, []))
            events.append(_event("free_completed", address, life.bytes, when, []))
    space.give(held_address, way.held)
    if way.held:
        events.append(_event("free_completed", held_address, way.held, clock[-1], []))
    return events


class _Space:
    """A space of addresses: an allocation takes the lowest gap that is large enough."""

    START = 1 << 40

    def __init__(self) -> None:
        self.free: list[tuple[int, int]] = []  # (address, bytes), by address
        self.end = self.START

    def take(self, size: int) -> int:
        size = -(-max(size, 1) // ALIGN) * ALIGN
        for at, (address, room) in enumerate(self.free):
            if room >= size:
                self.free[at : at + 1] = [(address + size, room - size)] if room > size else []
                return address
        address, self.end = self.end, self.end + size
        return address

    def give(self, address: int, size: int) -> None:
        size = -(-max(size, 1) // ALIGN) * ALIGN
        at = bisect.bisect(self.free, (address, 0))
        if at < len(self.free) and self.free[at][0] == address + size:
            size += self.free.pop(at)[1]
        if at and sum(self.free[at - 1]) == address:
            before, room = self.free.pop(at - 1)
            self.free.insert(at - 1, (before, room + size))
        else:
            self.free.insert(at, (address, size))


def _event(action: str, address: int, size: int, seconds: float, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": max(0, round(seconds * 1e6)),
        "frames": frames,
    }


def _frames(life: Life, program: str) -> list[dict[str, Any]]:
    record = info(life.node)
    path, _, line = record.source.rpartition(":")
    return [
        _frame(f"{life.node.name} ({life.category})", "", program),
        _frame(owner(life), line, path or program),
    ]


def _frame(name: str, line: str, path: str) -> dict[str, Any]:
    return {"name": name, "filename": path, "line": int(line) if line.isdigit() else 0}

"""Writes a simulated schedule for Perfetto and chrome://tracing, like `zgraph.inspection.trace`: a process for each
rank of "pp", with a lane for each of its stages.
"""

from __future__ import annotations

from typing import Any

from zgraph.stages.simulation import Timeline

__all__ = ["trace_of"]


def trace_of(timeline: Timeline) -> dict[str, Any]:
    """Return the trace: a complete event, in microseconds, for each action."""
    events: list[dict[str, Any]] = []
    for rank, row in enumerate(timeline.spans):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        for stage in timeline.schedule.stages_of(rank):
            head = {"ph": "M", "pid": rank, "tid": stage}
            events.append({**head, "name": "thread_name", "args": {"name": f"stage {stage}"}})
            events.append({**head, "name": "thread_sort_index", "args": {"sort_index": stage}})
        for action, begin, end in row:
            events.append(
                {
                    "ph": "X",
                    "name": str(action),
                    "cat": action.kind.name,
                    "pid": rank,
                    "tid": action.stage,
                    "ts": begin * 1e6,
                    "dur": (end - begin) * 1e6,
                    "args": {"stage": action.stage, "micro_batch": action.micro_batch},
                }
            )
    head = {"schedule": timeline.schedule.name, "bubble": timeline.bubble}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": head}

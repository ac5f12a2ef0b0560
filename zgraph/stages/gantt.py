"""Draws a simulated schedule as papers on pipelines do: a row for each rank, time from left to right, in plain
characters.

Each action is its micro-batch's number, followed by a character for its kind up to its end. If ranks have several
stages, a letter after the number tells which: a for a rank's first.
"""

from __future__ import annotations

from zgraph.plan.pipeline_schedules.actions import Kind
from zgraph.stages.simulation import Span, Timeline
from zgraph.units import milliseconds

__all__ = ["picture"]

_FILL = {Kind.F: "-", Kind.B: "=", Kind.I: "~", Kind.W: "+"}
_MEANING = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward of inputs", Kind.W: "backward of weights"}
_IDLE = "."


def picture(timeline: Timeline, width: int = 200) -> str:
    """Return the rows of a timeline, its bubble and makespan, and what its characters mean.

    It is wide enough for a number in the shortest action, but has at most `width` columns for the time: an action that
    is too short for its number is drawn without it, one shorter than a column not at all.
    """
    labels = {span.action: _label(timeline, span) for row in timeline.spans for span in row}
    shortest = min((s.end - s.begin for row in timeline.spans for s in row if s.end > s.begin), default=0.0)
    columns = 0
    if shortest:
        columns = min(width, round(timeline.makespan / shortest * (1 + max(map(len, labels.values())))))
    scale = columns / timeline.makespan if columns else 0.0
    digits = len(str(len(timeline.spans) - 1))
    lines = []
    for rank, row in enumerate(timeline.spans):
        drawn = ""
        for span in row:
            drawn += _IDLE * (round(span.begin * scale) - len(drawn))
            label, cells = labels[span.action], round(span.end * scale) - len(drawn)
            drawn += (label if len(label) < cells else "").ljust(cells, _FILL[span.action.kind])
        lines.append(f"rank {rank:>{digits}} |{drawn.ljust(columns, _IDLE)}|")
    there = {action.kind for action in labels}
    meanings = [f"0{_FILL[kind]} {_MEANING[kind]}" for kind in Kind if kind in there]
    lines.append(f"bubble {timeline.bubble:.1%}, makespan {milliseconds(timeline.makespan)}")
    lines.append(", ".join([*meanings, f"{_IDLE} idle"]))
    return "\n".join(lines)


def _label(timeline: Timeline, span: Span) -> str:
    schedule, action = timeline.schedule, span.action
    letter = ""
    if schedule.virtual > 1:
        letter = chr(ord("a") + schedule.stages_of(schedule.rank_of[action.stage]).index(action.stage))
    return f"{action.micro_batch}{letter}"

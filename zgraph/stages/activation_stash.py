"""Computes the memory that a schedule's micro-batches take on each rank between their forwards and backwards.

It depends only on the order in which a rank runs its actions, not on their durations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from zgraph.plan.pipeline_schedules.actions import Kind
from zgraph.plan.pipeline_schedules.schedule import Schedule

__all__ = ["stash_bytes"]


def stash_bytes(schedule: Schedule, saved: Sequence[int], kept_for_weights: float = 1.0) -> tuple[int, ...]:
    """Return for each rank the most bytes that its stages keep at once for their backwards.

    `saved` is what each stage saves for one micro-batch, in bytes: kept from its forward to the end of its backward. If
    the backward is split into I and W, the share `kept_for_weights` of it, from 0 to 1, is kept between them.
    """
    remaining_bytes = [math.ceil(whole * kept_for_weights) for whole in saved]

    def most(rank: int) -> int:
        stash = peak = 0
        for action in schedule.of(rank):
            whole, part = saved[action.stage], remaining_bytes[action.stage]
            stash += {Kind.F: whole, Kind.B: -whole, Kind.I: part - whole, Kind.W: -part}[action.kind]
            peak = max(peak, stash)
        return peak

    return tuple(most(rank) for rank in range(schedule.ranks))

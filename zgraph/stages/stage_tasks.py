"""Tells what each stage of a rank does in a step."""

from __future__ import annotations

from dataclasses import dataclass

from zgraph.plan.pipeline_schedules.actions import Action, Kind
from zgraph.plan.pipeline_schedules.schedule import Schedule


@dataclass(frozen=True)
class StageTask:
    """What a stage does in a step."""

    kinds: frozenset[Kind]  # the kinds of its actions
    last: Action | None  # the action after which the gradients of its weights are complete; None without a backward

    def reduction(self, action: Action, once: bool, summed: bool) -> tuple[bool, bool]:
        """Return for a backward (whether it reduces gradients, whether its program takes the sums of earlier
        micro-batches). `once`: gradients are reduced once per step; `summed`: there are sums.
        """
        if not once:
            return True, False
        return action == self.last, action == self.last and summed


def stage_tasks(schedule: Schedule, position: int) -> dict[int, StageTask]:
    """Return what each stage of a rank does."""
    mine = schedule.of(position)
    last = {a.stage: a for a in mine if a.kind in (Kind.B, Kind.W)}
    return {
        s: StageTask(frozenset(a.kind for a in mine if a.stage == s), last.get(s)) for s in schedule.stages_of(position)
    }

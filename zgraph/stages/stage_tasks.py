"""What a stage has to do in a step, of all that its rank does."""

from __future__ import annotations

from dataclasses import dataclass

from zgraph.plan.pipeline_schedules.actions import Action, Kind
from zgraph.plan.pipeline_schedules.schedule import Schedule


@dataclass(frozen=True)
class Duty:
    """What a stage does in a step: the `kinds` of its actions, and the `last` after which the gradients of its weights are complete (None
    without a backward)."""

    kinds: frozenset[Kind]
    last: Action | None

    def reduction(self, action: Action, once: bool, summed: bool) -> tuple[bool, bool]:
        """Of a backward: (does it reduce?, do the sums of earlier micro-batches come into its program?). Are gradients reduced `once` in a
        step, and are there sums?"""
        if not once:
            return True, False
        return action == self.last, action == self.last and summed


def duties(schedule: Schedule, position: int) -> dict[int, Duty]:
    """What each stage of a rank does."""
    mine = schedule.of(position)
    last = {a.stage: a for a in mine if a.kind in (Kind.B, Kind.W)}
    return {s: Duty(frozenset(a.kind for a in mine if a.stage == s), last.get(s)) for s in schedule.stages_of(position)}

"""Which actions an action of a schedule waits for.

A forward waits for the forwards of the stages that send to its own; a backward, whole or of inputs, for its own
forward and for the backwards of the stages that its own sends to; a backward of weights for that of inputs. In a chain
of stages these are the stage before and the stage after. A skip connection adds others.
"""

from __future__ import annotations

from dataclasses import dataclass

from zgraph.errors import PlanError
from zgraph.plan.pipeline_schedules.actions import Action, Kind
from zgraph.plan.pipeline_schedules.schedule import Schedule

__all__ = ["Needs", "waits"]


@dataclass(frozen=True)
class Needs:
    """Which stages send to which."""

    forward: tuple[tuple[int, ...], ...]  # for each stage the stages whose values its forward reads
    backward: tuple[tuple[int, ...], ...]  # for each stage the stages whose backwards give it gradients

    @classmethod
    def chain(cls, stages: int) -> Needs:
        """Return the needs of a chain, in which each stage sends to the next."""
        return cls(
            tuple((stage - 1,) if stage else () for stage in range(stages)),
            tuple((stage + 1,) if stage + 1 < stages else () for stage in range(stages)),
        )


def waits(schedule: Schedule, needs: Needs | None = None) -> dict[Action, tuple[Action, ...]]:
    """Return, for each action, the actions that must have ended before it; without `needs` the stages are a chain.

    The schedule must have passed `check_table`. Raises `PlanError` where `needs` is of another number of stages.
    """
    needs = Needs.chain(schedule.stages) if needs is None else needs
    if {len(needs.forward), len(needs.backward)} != {schedule.stages}:
        raise PlanError(
            f"the schedule {schedule.name!r} is for {schedule.stages} stages, and the model has {len(needs.forward)}",
            where="schedule",
        )
    actions = [action for rank in range(schedule.ranks) for action in schedule.of(rank)]
    # The backward that computes gradients for earlier stages: for each stage and micro-batch one B or one I.
    backwards = {(a.stage, a.micro_batch): a for a in actions if a.kind in (Kind.B, Kind.I)}
    predecessors: dict[Action, tuple[Action, ...]] = {}
    for action in actions:
        stage, micro_batch = action.stage, action.micro_batch
        if action.kind is Kind.F:
            predecessors[action] = tuple(Action(Kind.F, sender, micro_batch) for sender in needs.forward[stage])
        elif action.kind is Kind.W:
            predecessors[action] = (Action(Kind.I, stage, micro_batch),)
        else:
            givers = tuple(backwards[giver, micro_batch] for giver in needs.backward[stage])
            predecessors[action] = (Action(Kind.F, stage, micro_batch), *givers)
    return predecessors

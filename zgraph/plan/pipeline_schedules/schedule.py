"""The definition of a schedule: for each rank of a pipeline the actions of one step, in the order in which it runs
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zgraph.errors import PlanError
from zgraph.plan.pipeline_schedules.actions import Action, Kind

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """A table of actions. Whether it is a training step is checked by `zgraph.plan.pipeline_schedules.validity`."""

    name: str  # as in the plan: a name, a CSV file or a function
    micro_batches: int  # how many micro-batches a step has
    rank_of: tuple[int, ...]  # for each stage the rank of the mesh's "pp" that owns it
    # for each rank its actions in order; None is a slot in which the table's author saw it idle: nothing waits for it
    rows: tuple[tuple[Action | None, ...], ...]

    @classmethod
    def from_rows(cls, name: str, rows: Sequence[Sequence[Action | None]], stages: int, micro_batches: int) -> Schedule:
        """Return a schedule in which a stage is owned by the first rank whose row has actions of it.

        Raises `PlanError` where a stage has no action at all, or a rank none.
        """
        owners: dict[int, int] = {}
        for rank, row in enumerate(rows):
            if not any(row):
                raise PlanError(f"the schedule {name!r} gives rank {rank} nothing to do", where="schedule")
            for action in row:
                if action is not None:
                    owners.setdefault(action.stage, rank)
        absent = next((stage for stage in range(stages) if stage not in owners), None)
        if absent is not None:
            raise PlanError(
                f"the schedule {name!r} has no action of stage {absent}",
                where="schedule",
                why=f"there are {stages} stages, counted from 0",
            )
        return cls(name, micro_batches, tuple(owners[stage] for stage in range(stages)), tuple(map(tuple, rows)))

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    @property
    def virtual(self) -> int:
        """How many stages a rank owns; where they own different numbers, the largest."""
        return max(self.rank_of.count(rank) for rank in range(self.ranks))

    @property
    def apart(self) -> bool:
        """Whether some backward is two actions, I and W, so that stages need a program for each."""
        return any(action is not None and action.kind is Kind.I for row in self.rows for action in row)

    def of(self, rank: int) -> tuple[Action, ...]:
        """Return what a rank runs, in order."""
        return tuple(action for action in self.rows[rank] if action is not None)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank owns, first to last."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

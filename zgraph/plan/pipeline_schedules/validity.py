"""Checks that a table of actions is a training step: each forward and backward once, in an order that ranks can run.

The first half checks each row and each stage alone. The second runs the table without computing anything: each rank
takes its actions in order, and one that waits for others stops until they are done. Where no rank can go on there is a
cycle of ranks that wait for each other, which the error shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from zgraph.errors import PlanError
from zgraph.plan.pipeline_schedules.actions import Action, Kind
from zgraph.plan.pipeline_schedules.dependencies import Needs, waits
from zgraph.plan.pipeline_schedules.schedule import Schedule

__all__ = ["check", "check_table", "in_order"]


def check(schedule: Schedule, needs: Needs | None = None) -> None:
    """Raise `PlanError` for a table that is no training step, or in which ranks wait for each other for ever.

    `needs` says which stages send to which; None is a chain.
    """
    check_table(schedule)
    in_order(schedule, waits(schedule, needs))


def check_table(schedule: Schedule) -> None:
    """Check all that `check` does, except for what depends on which stage sends to which. Raises `PlanError`."""
    places: dict[Action, int] = {}
    for rank, row in enumerate(schedule.rows):
        for place, action in enumerate(row):
            if action is not None:
                _check_place(schedule, action, rank)
                if action in places:
                    raise _wrong(schedule, f"{action} stands twice on rank {rank}")
                places[action] = place
    for stage in range(schedule.stages):
        for micro_batch in range(schedule.micro_batches):
            _check_pair(schedule, places, stage, micro_batch)


def _check_place(schedule: Schedule, action: Action, rank: int) -> None:
    for what, number, count in (
        ("stage", action.stage, schedule.stages),
        ("micro-batch", action.micro_batch, schedule.micro_batches),
    ):
        if not 0 <= number < count:
            text = f"{action} on rank {rank} is of {what} {number}"
            raise _wrong(schedule, text, why=f"there are {count}, counted from 0")
    owner = schedule.rank_of[action.stage]
    if owner != rank:
        raise _wrong(
            schedule,
            f"stage {action.stage} stands on rank {owner} and, in {action}, on rank {rank}",
            why="a stage's weights lie on one rank",
        )


def _check_pair(schedule: Schedule, places: Mapping[Action, int], stage: int, micro_batch: int) -> None:
    """Check that one stage and micro-batch has F and then B, or F, I and then W, all in one row."""
    forward, backward, inputs, weights = (Action(kind, stage, micro_batch) for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
    rank = schedule.rank_of[stage]
    halves = [half for half in (inputs, weights) if half in places]
    if backward in places and halves:
        raise _wrong(schedule, f"rank {rank} has both {backward} and {halves[0]}", why="B is I and W in one")
    if backward not in places and not halves:
        raise _wrong(schedule, f"rank {rank} has neither {backward} nor {inputs} and {weights}")
    if len(halves) == 1:
        absent = weights if inputs in halves else inputs
        raise _wrong(schedule, f"rank {rank} has {halves[0]} without {absent}", why="a backward is B, or I and W")
    if forward not in places:
        raise _wrong(schedule, f"rank {rank} lacks {forward}")
    order = [forward, inputs, weights] if halves else [forward, backward]
    for first, second in pairwise(order):
        if places[second] < places[first]:
            raise _wrong(schedule, f"{second} stands before {first} on rank {rank}")


def in_order(schedule: Schedule, waiting: Mapping[Action, tuple[Action, ...]]) -> list[Action]:
    """Return all actions in an order in which each comes after those it waits for, and after those before it in its
    row.

    `waiting` is what `zgraph.plan.pipeline_schedules.dependencies.waits` gives. Raises `PlanError` for a deadlock,
    with a cycle of waiting ranks.
    """
    rows = [schedule.of(rank) for rank in range(schedule.ranks)]
    at = [0] * len(rows)
    done: dict[Action, None] = {}
    going = True
    while going:
        going = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and all(needed in done for needed in waiting[row[at[rank]]]):
                done[row[at[rank]]] = None
                at[rank] += 1
                going = True
    heads = {rank: row[place] for rank, (row, place) in enumerate(zip(rows, at, strict=True)) if place < len(row)}
    if heads:
        raise PlanError(
            f"the schedule {schedule.name!r} deadlocks",
            where="schedule",
            why=_cycle(schedule, heads, {rank: _first_not_in(done, waiting[head]) for rank, head in heads.items()}),
            hint="in a rank's row an action must stand behind all that those before it wait for",
        )
    return list(done)


def _first_not_in(done: Mapping[Action, None], needed: tuple[Action, ...]) -> Action:
    return next(action for action in needed if action not in done)


def _cycle(schedule: Schedule, heads: Mapping[int, Action], missing: Mapping[int, Action]) -> str:
    """Return a cycle of ranks that wait for each other, as text.

    Each stuck rank waits for an action of another stuck rank, or its own, so following them comes back to a rank seen
    before.
    """
    circle: list[int] = []
    rank = next(iter(heads))
    while rank not in circle:
        circle.append(rank)
        rank = schedule.rank_of[missing[rank].stage]
    circle = circle[circle.index(rank) :]
    text = f"rank {circle[0]} waits in {heads[circle[0]]}"
    for here, there in zip(circle, [*circle[1:], circle[0]], strict=True):
        needed, head = missing[here], heads[there]
        stands = f"for {needed}" + (f", which stands behind {head}" if needed != head else "") + f" on rank {there}"
        text += f" {stands}" if here == circle[0] else f", which waits {stands}"
    return text


def _wrong(schedule: Schedule, what: str, why: str | None = None) -> PlanError:
    return PlanError(f"the schedule {schedule.name!r} is no training step: {what}", where="schedule", why=why)

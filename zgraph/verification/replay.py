"""Run a schedule's actions in one process, one after another, in an order in which ranks could have run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from zgraph.passes.stages.cut_stages import Stages
from zgraph.plan.pipeline_schedules.actions import Action, Kind
from zgraph.plan.pipeline_schedules.dependencies import waits
from zgraph.plan.pipeline_schedules.schedule import Schedule
from zgraph.plan.pipeline_schedules.validity import in_order
from zgraph.stages.stage_programs import needs_of

__all__ = ["replay"]

T = TypeVar("T")


def replay(schedule: Schedule, stages: Stages, run: Callable[[Action, dict[str, T]], Mapping[str, T]]) -> None:
    """Call `run(action, came)` for each action of all ranks. `came` are the values that others have sent to it; it
    returns those it sends, both by name.

    Raises `PlanError` for a schedule that deadlocks, `AssertionError` for a value that was sent and that nothing took.
    """
    crossing: dict[tuple[str, int, int, bool], T] = {}
    for action in in_order(schedule, waits(schedule, needs_of(stages))):
        stage, number, back = action.stage, action.micro_batch, action.kind is not Kind.F
        transfers = [t for t in stages.transfers if t.back is back] if action.kind is not Kind.W else []
        came = {t.name: crossing.pop((t.name, stage, number, back)) for t in transfers if t.target == stage}
        sent = run(action, came)
        crossing |= {(t.name, t.target, number, back): sent[t.name] for t in transfers if t.source == stage}
    if crossing:
        raise AssertionError(f"nothing took {sorted(name for name, *_ in crossing)}")

"""How long a schedule takes, and where its ranks idle: its actions as spans of time, without running anything.

A rank runs its actions one after another, each as soon as all it waits for has arrived. What a stage sends leaves when the action that made
it ends, and travels while its rank computes on; transfers from one rank to another go one after another. Stages on one rank need none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from zgraph.plan.pipeline_schedules.actions import Action, Kind
from zgraph.plan.pipeline_schedules.dependencies import Needs, waits
from zgraph.plan.pipeline_schedules.schedule import Schedule
from zgraph.plan.pipeline_schedules.validity import in_order

__all__ = ["Durations", "Span", "Timeline", "Times", "replay"]


class Durations(Protocol):
    """What says how long actions take."""

    def of(self, action: Action, waited: float) -> float:
        """Its seconds. Its rank has `waited` so long for what it receives, with nothing to compute."""


@dataclass(frozen=True)
class Times:
    """The seconds that each stage's actions take, alike for all micro-batches."""

    forward: Sequence[float]
    backward: Sequence[float] | None = None
    """None: the sum of the two below."""
    input_gradients: Sequence[float] | None = None
    """None, like the next, where the schedule has no I and W."""
    weight_gradients: Sequence[float] | None = None

    def of(self, action: Action, waited: float = 0.0) -> float:
        """Raise `ValueError` where nothing says how long such an action takes."""
        if action.kind is Kind.F:
            return self.forward[action.stage]
        if action.kind is Kind.B and self.backward is not None:
            return self.backward[action.stage]
        if self.input_gradients is None or self.weight_gradients is None:
            raise ValueError(f"there are no times for actions such as {action}")
        inputs, weights = self.input_gradients[action.stage], self.weight_gradients[action.stage]
        return {Kind.I: inputs, Kind.W: weights, Kind.B: inputs + weights}[action.kind]


class Span(NamedTuple):
    """An action, and when it runs, in seconds since the step began."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A step by a schedule, simulated."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    """For each rank its actions in order."""

    @property
    def makespan(self) -> float:
        """The seconds from the first action's begin to the last one's end."""
        return max(row[-1].end for row in self.spans)

    @property
    def busy(self) -> tuple[float, ...]:
        """For each rank the seconds in which it computes."""
        return tuple(sum(span.end - span.begin for span in row) for row in self.spans)

    @property
    def idle(self) -> tuple[float, ...]:
        """For each rank the other seconds of the step."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they idle, from 0 to 1: (p - 1) / (m + p - 1) for 1F1B with p equal stages and m micro-batches."""
        whole = self.makespan * len(self.spans)
        return sum(self.idle) / whole if whole else 0.0


def replay(
    schedule: Schedule,
    times: Durations,
    transfer: Callable[[int, int], float] | None = None,
    needs: Needs | None = None,
) -> Timeline:
    """The step that ranks make by a schedule.

    `transfer` gives the seconds of one micro-batch's transfer from one stage to another (forward or backward); None means that it takes no time.
    `needs` says which stages send to which; None is a chain. The schedule must have passed `check_table`. Raises `PlanError` for a deadlock.
    """
    waiting = waits(schedule, needs)
    readers: dict[Action, list[Action]] = defaultdict(list)
    for action, needed in waiting.items():
        for sender in needed:
            readers[sender].append(action)
    free = [0.0] * schedule.ranks  # (when each rank has ended what it ran so far)
    links: dict[tuple[int, int], float] = defaultdict(float)  # (the same of each pair of ranks and its transfers)
    arrived: dict[Action, float] = defaultdict(float)  # (when the last of what an action waits for is there)
    spans: list[list[Span]] = [[] for _ in range(schedule.ranks)]
    for action in in_order(schedule, waiting):
        rank = schedule.rank_of[action.stage]
        begin = max(free[rank], arrived[action])
        end = free[rank] = begin + times.of(action, begin - free[rank])
        spans[rank].append(Span(action, begin, end))
        # A rank's actions come here in its order, so each pair's transfers begin in the order in which they are made.
        for reader in sorted(readers[action]):
            there = schedule.rank_of[reader.stage]
            at = end
            if there != rank and transfer is not None:
                at = links[rank, there] = max(end, links[rank, there]) + transfer(action.stage, reader.stage)
            arrived[reader] = max(arrived[reader], at)
    return Timeline(schedule, tuple(map(tuple, spans)))

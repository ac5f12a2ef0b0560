"""Simulates a schedule: its actions as spans of time, and where its ranks idle, without running anything.

A rank runs its actions one after another, each as soon as all it waits for has arrived. What a stage sends leaves when
the action that made it ends, and travels while its rank computes on; transfers from one rank to another go one after
another. Stages on one rank need none.
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
    """What tells how long actions take."""

    def of(self, action: Action, waited: float) -> float:
        """Return the seconds of an action. Its rank has `waited` for that many seconds for what it receives, with
        nothing to compute.
        """


@dataclass(frozen=True)
class Times:
    """The seconds that each stage's actions take, the same for all micro-batches."""

    forward: Sequence[float]  # of each stage's F
    backward: Sequence[float] | None = None  # of each stage's B; None: the sum of the two below
    input_gradients: Sequence[float] | None = None  # of each stage's I; None if the schedule has none
    weight_gradients: Sequence[float] | None = None  # of each stage's W; None if the schedule has none

    def of(self, action: Action, waited: float = 0.0) -> float:
        """Return the seconds of an action. Raises `ValueError` if nothing tells them."""
        if action.kind is Kind.F:
            return self.forward[action.stage]
        if action.kind is Kind.B and self.backward is not None:
            return self.backward[action.stage]
        if self.input_gradients is None or self.weight_gradients is None:
            raise ValueError(f"there are no times for actions such as {action}")
        inputs, weights = self.input_gradients[action.stage], self.weight_gradients[action.stage]
        return {Kind.I: inputs, Kind.W: weights, Kind.B: inputs + weights}[action.kind]


class Span(NamedTuple):
    """An action and the time at which it runs."""

    action: Action  # what runs
    begin: float  # seconds since the step began
    end: float  # seconds since the step began


@dataclass(frozen=True)
class Timeline:
    """A simulated step of a schedule."""

    schedule: Schedule  # what was simulated
    spans: tuple[tuple[Span, ...], ...]  # each rank's actions, in order

    @property
    def makespan(self) -> float:
        """The seconds from the beginning of the first action to the end of the last one."""
        return max(row[-1].end for row in self.spans)

    @property
    def busy(self) -> tuple[float, ...]:
        """The seconds in which each rank computes."""
        return tuple(sum(span.end - span.begin for span in row) for row in self.spans)

    @property
    def idle(self) -> tuple[float, ...]:
        """The seconds of the step in which each rank does not compute."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they idle, from 0 to 1: (p - 1) / (m + p - 1) for 1F1B with p equal
        stages and m micro-batches.
        """
        whole = self.makespan * len(self.spans)
        return sum(self.idle) / whole if whole else 0.0


def replay(
    schedule: Schedule,
    times: Durations,
    transfer: Callable[[int, int], float] | None = None,
    needs: Needs | None = None,
) -> Timeline:
    """Return the timeline of a step of a schedule.

    `transfer` returns the seconds of one micro-batch's transfer from one stage to another (forward or backward); None
    means that it takes no time. `needs` tells which stages send to which; None is a chain. The schedule must have
    passed `check_table`. Raises `PlanError` for a deadlock.
    """
    waiting = waits(schedule, needs)
    readers: dict[Action, list[Action]] = defaultdict(list)
    for action, needed in waiting.items():
        for sender in needed:
            readers[sender].append(action)
    free = [0.0] * schedule.ranks  # (when each rank has ended its last action)
    links: dict[tuple[int, int], float] = defaultdict(float)  # (when each pair of ranks has ended its last transfer)
    arrived: dict[Action, float] = defaultdict(float)  # (when the last input of an action has arrived)
    spans: list[list[Span]] = [[] for _ in range(schedule.ranks)]
    for action in in_order(schedule, waiting):
        rank = schedule.rank_of[action.stage]
        begin = max(free[rank], arrived[action])
        end = free[rank] = begin + times.of(action, begin - free[rank])
        spans[rank].append(Span(action, begin, end))
        # Actions are visited in each rank's order, so the transfers of each pair begin in the order in which they are
        # sent.
        for reader in sorted(readers[action]):
            there = schedule.rank_of[reader.stage]
            at = end
            if there != rank and transfer is not None:
                at = links[rank, there] = max(end, links[rank, there]) + transfer(action.stage, reader.stage)
            arrived[reader] = max(arrived[reader], at)
    return Timeline(schedule, tuple(map(tuple, spans)))

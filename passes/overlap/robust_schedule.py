"""Chooses one of several schedules: one that costs next to nothing if costs are right, and least if they are wrong.

Costs are estimates: a link is shared with others now and then, products are slower beside transfers, and no program
reaches a data sheet's rates. So the step is scheduled for links that are up to `SPEED_SAFETY_FACTOR` times faster and slower than
stated, and each schedule is replayed on all these links. (To a schedule, slower products are the same as faster links.)
The time that a schedule would lose on a link against the schedule that is best on it is its regret; the least of the
greatest regrets wins (Savage, 1951, "The Theory of Statistical Decision"), among schedules that lose at most `PRICE` if
links are as fast as stated. Bounds on memory hold for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zgraph.passes.overlap.scheduling_problem import Bucket

SPEED_SAFETY_FACTOR = (
    4.0  # kernels reach a quarter of a data sheet's rates and more; four ranks of a machine share its link
)
# of links, as multiples of their stated speed; where schedules for SPEEDS lose much, those BETWEEN them are tried as well
SPEEDS = (1.0, *(SPEED_SAFETY_FACTOR ** (k / 2) for k in (1, 2, -1, -2)))
BETWEEN = tuple(SPEED_SAFETY_FACTOR ** (k / 4) for k in (1, 3, -1, -3))
PRICE = 0.01  # of a step's time


@dataclass(frozen=True)
class Event:
    """One event of a schedule: computation, the start of a bucket, or the wait for it."""

    seconds: float = 0.0  # of computation, if there is no bucket
    bucket: Bucket | None = None  # the transfers that start or are waited for
    ahead: bool = False  # whether the bucket starts ahead of the program
    waits: bool = False  # whether this is the wait for the bucket, not its start


@dataclass(frozen=True)
class CandidateSchedule:
    """The schedule that a scheduler has decided."""

    events: Sequence[Event]  # what happens, in order
    speed: float  # the speed of links that it was made for, as a multiple of the stated one
    lead: float  # seconds that transfers have that start ahead of the program

    def seconds(self, speed: float) -> float:
        """Return the seconds that the step takes over a link of this speed, from its first operator on."""
        clock, link = 0.0, -self.lead
        done: dict[Bucket, float] = {}
        for event in self.events:
            bucket = event.bucket
            if bucket is None:
                clock += event.seconds
            elif event.waits:
                clock = max(clock, done[bucket])
            else:
                clock += 0.0 if event.ahead else bucket.work
                begins = link if event.ahead else max(link, clock)
                done[bucket] = link = begins + bucket.seconds * self.speed / speed
        return max(clock, link)


def least_regret(schedules: Sequence[CandidateSchedule]) -> tuple[int, float]:
    """Return the position of the schedule to take, and its greatest regret; the first one is made for the stated speed of
    links.
    """
    return least_regret_of([[played.seconds(speed) for speed in SPEEDS] for played in schedules])


def least_regret_of(seconds: Sequence[Sequence[float]]) -> tuple[int, float]:
    """Return the position of the choice to take, and its greatest regret. `seconds` has a row for each choice: how long
    it takes over links of each of `SPEEDS`.
    """
    best = [min(column) or 1.0 for column in zip(*seconds, strict=True)]
    regrets = [[mine / least - 1 for mine, least in zip(row, best, strict=True)] for row in seconds]
    fair = [at for at, row in enumerate(regrets) if row[0] <= PRICE]
    taken = min(fair, key=lambda at: (round(max(regrets[at]), 4), at))
    return taken, max(regrets[taken])

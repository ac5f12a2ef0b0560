"""Which of several schedules is taken: one that costs next to nothing if costs are right, and least if they are wrong.

Costs are estimates: a link is shared with others now and then, products are slower beside transfers, and a data sheet's rates are reached by
nothing. So the step is scheduled for links that are up to `DOUBT` times faster and slower than they are said to be, and each schedule is
replayed on all these links. (That products are as many times slower is the same to a schedule as that links are faster.) What a schedule
would lose on a link against the one that is best there is its regret; the least of the greatest regrets wins (Savage, 1951, "The Theory of
Statistical Decision"), among schedules that lose at most `PRICE` if all is as it is said to be. Bounds on memory hold for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zgraph.passes.overlap.scheduling_problem import Bucket

DOUBT = 4.0  # kernels reach a quarter of a data sheet's rates and more; four ranks of a machine share its link
SPEEDS = (1.0, 2.0, DOUBT, 0.5, 1 / DOUBT)  # of links, by what they are said to be
PRICE = 0.01  # of a step's time


@dataclass(frozen=True)
class Event:
    """Computing of so many `seconds`, the start of a `bucket` (`ahead` of the program, or in it), or the wait for it."""

    seconds: float = 0.0
    bucket: Bucket | None = None
    ahead: bool = False
    waits: bool = False


@dataclass(frozen=True)
class Played:
    """What a scheduler has decided: its events in order, made for a link of that `speed`. What starts ahead has `lead` seconds."""

    events: Sequence[Event]
    speed: float
    lead: float

    def seconds(self, speed: float) -> float:
        """What the step takes over a link of this speed, from its first operator on."""
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


def least_regret(schedules: Sequence[Played]) -> int:
    """The position of the schedule to take; the first one is that for the speed that links are said to have."""
    seconds = [[played.seconds(speed) for speed in SPEEDS] for played in schedules]
    best = [min(column) or 1.0 for column in zip(*seconds, strict=True)]
    regrets = [[mine / least - 1 for mine, least in zip(row, best, strict=True)] for row in seconds]
    fair = [at for at, row in enumerate(regrets) if row[0] <= PRICE]
    return min(fair, key=lambda at: (round(max(regrets[at]), 4), at))

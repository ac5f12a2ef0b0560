"""The memory that the overlap pass may use: the caps on gathered bytes and on waiting gradients, and the bytes in use
as the schedule grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median_high

from zgraph.errors import PlanError
from zgraph.passes.analysis.memory_slack import MemorySlack
from zgraph.passes.analysis.parameter_collectives import largest_layer
from zgraph.passes.overlap.scheduling_problem import Bucket, SchedulingProblem
from zgraph.units import shown_bytes

NO_BOUND = 2**60  # bytes


@dataclass(frozen=True)
class Bounds:
    """Bytes that a plan allows; the fields are those of `OverlapOptions` with the same names."""

    max_bytes: int | None  # gathered bytes at any time
    room_bytes: int | None  # gathered bytes beyond what is needed at once
    spare_bytes: int | None  # bytes by which early gathers may raise the step's peak
    ahead_bytes: int | None  # gathered bytes that nothing has used yet
    reduce_bytes: int | None  # bytes of gradients that wait to be scattered


class BoundedMemory:
    """The bytes in use at the position that the schedule has reached, and the bytes that may be in use.

    Its constructor raises `PlanError` if the gathered weights that are needed at once are more than the plan allows.
    """

    def __init__(self, step: SchedulingProblem, bounds: Bounds) -> None:
        self._bounds = bounds
        self.spare = self._spare(step)
        self.room = self._room(step)
        layer = largest_layer(step.program)
        self.cap = self._cap(step, layer)
        self.cap_ahead = self.cap if bounds.ahead_bytes is None else bounds.ahead_bytes
        waiting = 2 * (layer or max((b.held for b in step.reductions), default=0))
        self.cap_reduce = waiting if bounds.reduce_bytes is None else bounds.reduce_bytes
        self.live = 0  # gathered
        self.ahead = 0  # gathered, and read by nothing yet
        self.waiting = 0  # gradients that wait to be scattered
        self.peak = 0  # the most that was gathered

    def _spare(self, step: SchedulingProblem) -> int:
        if self._bounds.spare_bytes is not None:
            return self._bounds.spare_bytes
        if self._bounds.max_bytes is not None:
            return NO_BOUND
        sizes = [bucket.held for bucket in step.gathers if bucket.counted]
        return max(largest_layer(step.program), int(median_high(sizes)) if sizes else 0)

    def _room(self, step: SchedulingProblem) -> MemorySlack:
        needed = [(b.first, step.last[m], m.bytes) for b in step.gathers if b.counted for m in b.members]
        return MemorySlack(step.others, needed, self.spare)

    def _cap(self, step: SchedulingProblem, layer: int) -> int:
        """Return the cap on gathered bytes."""
        needed, which = step.needed()
        room = 2 * layer if self._bounds.room_bytes is None else self._bounds.room_bytes
        cap = needed + room if self._bounds.max_bytes is None else self._bounds.max_bytes
        if needed <= cap:
            return cap
        names = [m.name for b in which for m in b.members]
        raise PlanError(
            f"gathered parameters can't be held within {shown_bytes(cap)}",
            where="prefetch.max_bytes",
            why=f"{step.program.name} needs {shown_bytes(needed)} at once: {', '.join(names[:6])}{' …' if len(names) > 6 else ''}",
            hint=f"the smallest that works is {needed} bytes, with no prefetch at all; smaller buckets may need less",
        )

    def start(self, gather: Bucket, at: int) -> None:
        """Count a gather that starts at operator `at`."""
        if gather.counted:
            self.live += gather.held
            self.ahead += gather.held
            self.peak = max(self.peak, self.live)
            self.room.hold(at, gather.first, gather.held)

    def arrive(self, gather: Bucket) -> None:
        """Count a gather as used: its first reader comes next."""
        if gather.counted:
            self.ahead -= gather.held

    def refusal(self, gather: Bucket, at: int) -> tuple[str, str] | None:
        """Return why a gather may not start at operator `at`, and the setting of the plan that would let it; None if it
        may.
        """
        if not gather.counted:
            return None
        live, ahead = self.live + gather.held, self.ahead + gather.held
        if live > self.cap:
            return (
                f"gathered bytes would reach {shown_bytes(live)}, cap {shown_bytes(self.cap)}",
                f"prefetch.max_bytes={live}",
            )
        if ahead > self.cap_ahead:
            why = f"gathered bytes that nothing has used would reach {shown_bytes(ahead)}, cap {shown_bytes(self.cap_ahead)}"
            return why, f"prefetch.ahead_bytes={ahead}"
        reached = self.room.reached(at, gather.first, gather.held + self.waiting)
        if reached > self.room.limit:
            why = f"the step's memory would reach {shown_bytes(reached)}, limit {shown_bytes(self.room.limit)}"
            return why, f"prefetch.spare_bytes={reached - self.room.limit + self.spare}"
        return None

    def too_many_wait(self, at: int) -> bool:
        """Return whether more gradients wait before operator `at` than the plan allows, or, without a bound, than there
        is memory for.
        """
        if self.waiting > self.cap_reduce:
            return True
        return self._bounds.reduce_bytes is None and self.room.reached(at, at + 1, self.waiting) > self.room.limit

"""Schedules transfers in the order of another program, so that ranks that run one program and ranks that run the other
communicate in the same order.

Only how early a transfer starts within that order depends on the operators' times. Which transfers start ahead of the
program, in the forward and in the backward is the same in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import fx

from zgraph.passes.analysis.parameter_collectives import gathers_of, reductions_of
from zgraph.program import collectives
from zgraph.program.node import Phase, Role, info
from zgraph.program.program import Program

if TYPE_CHECKING:
    from zgraph.passes.overlap.scheduling_problem import Bucket, SchedulingProblem


class Start(NamedTuple):
    """The start of a transfer, or of a bucket of transfers."""

    reduces: bool  # whether it reduces gradients; else it gathers parameters
    group: str  # the group that it runs over
    names: tuple[str, ...]  # the parameters that it serves
    phase: str  # the phase in which it starts
    ahead: bool  # whether it starts ahead of the program


def order_of(program: Program) -> tuple[Start, ...]:
    """Return the starts of a scheduled program's transfers, in order."""
    transfers = sorted([*gathers_of(program), *reductions_of(program)], key=lambda t: t.start)
    starts_by_bucket: dict[object, list[fx.Node]] = {}
    for transfer in transfers:
        starts_by_bucket.setdefault(info(transfer.start).bucket or transfer, []).append(transfer.start)
    return tuple([_start(starts) for starts in starts_by_bucket.values()])


def _start(starts: list[fx.Node]) -> Start:
    first = info(starts[0])
    names = tuple([str(info(s).param) for s in starts])
    return Start(first.role is Role.REDUCE, collectives.group_of(starts[0]), names, str(first.phase), first.ahead)


@dataclass
class FollowedOrder:
    """The buckets of a step that have not started yet, in the order of another program."""

    left: list[tuple[Bucket, Start]]  # each bucket with its start in the other program

    @property
    def next(self) -> Bucket | None:
        return self.left[0][0] if self.left else None

    def begins_in(self, phase: Phase) -> bool:
        """Return whether the next bucket starts in this phase."""
        return bool(self.left) and self.left[0][1].phase == phase

    def begins_ahead(self) -> bool:
        return bool(self.left) and self.left[0][1].ahead


def follow_order(step: SchedulingProblem, order: tuple[Start, ...]) -> FollowedOrder | None:
    """Return the buckets in this order; None if the two programs do not have the same ones."""
    buckets_by_start: dict[tuple[object, ...], list[Bucket]] = {}
    for bucket in (*step.gathers, *step.reductions):
        buckets_by_start.setdefault(tuple(_start([m.start for m in bucket.members])[:3]), []).append(bucket)
    left = []
    for start in order:
        same = buckets_by_start.get(tuple(start[:3]))
        if not same:
            return None
        left.append((same.pop(0), start))
    return None if any(buckets_by_start.values()) else FollowedOrder(left)

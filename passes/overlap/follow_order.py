"""Schedules transfers in the order of another program: ranks that run the one while others run the other communicate in the same way.

How long operators take decides only how early a transfer starts within that order. What starts ahead of the program, in the forward and in
the backward is the same in both.
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
    from zgraph.passes.overlap.scheduling_problem import Bucket, StepToSchedule


class Start(NamedTuple):
    """A transfer, or a bucket of them, that starts: of these parameters, over a group, in a phase or `ahead` of the program."""

    reduces: bool
    group: str
    names: tuple[str, ...]
    phase: str
    ahead: bool


def order_of(program: Program) -> tuple[Start, ...]:
    """The starts of a scheduled program's transfers, in order."""
    transfers = sorted([*gathers_of(program), *reductions_of(program)], key=lambda t: t.start)
    found: dict[object, list[fx.Node]] = {}
    for transfer in transfers:
        found.setdefault(info(transfer.start).bucket or transfer, []).append(transfer.start)
    return tuple([_start(starts) for starts in found.values()])


def _start(starts: list[fx.Node]) -> Start:
    first = info(starts[0])
    names = tuple([str(info(s).param) for s in starts])
    return Start(first.role is Role.REDUCE, collectives.group_of(starts[0]), names, str(first.phase), first.ahead)


@dataclass
class Followed:
    """The buckets of a step in the order of another program, with what that says of each."""

    left: list[tuple[Bucket, Start]]

    @property
    def next(self) -> Bucket | None:
        return self.left[0][0] if self.left else None

    def begins_in(self, phase: Phase) -> bool:
        """Does the next one start in this phase?"""
        return bool(self.left) and self.left[0][1].phase == phase

    def begins_ahead(self) -> bool:
        return bool(self.left) and self.left[0][1].ahead


def followed(step: StepToSchedule, order: tuple[Start, ...]) -> Followed | None:
    """The buckets in this order; None where the programs do not have the same ones."""
    found: dict[tuple[object, ...], list[Bucket]] = {}
    for bucket in (*step.gathers, *step.reductions):
        found.setdefault(tuple(_start([m.start for m in bucket.members])[:3]), []).append(bucket)
    left = []
    for start in order:
        same = found.get(tuple(start[:3]))
        if not same:
            return None
        left.append((same.pop(0), start))
    return None if any(found.values()) else Followed(left)

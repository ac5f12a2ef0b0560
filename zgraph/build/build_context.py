"""What the programs of a model are built with, besides the model itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from zgraph.build.pass_pipeline import EVERY_PASS, PassFilter, Variant
from zgraph.passes.analysis.costs import Costs
from zgraph.passes.overlap.follow_order import Start
from zgraph.plan.plan import Plan
from zgraph.program.program import Program


@dataclass(frozen=True)
class ResidentMemory:
    """What there is besides forward and backward: bytes `held` all the time, `waiting` of them gradients between micro-batches, all
    bytes at the peak of the `update`, and the seconds that it takes, `late` beside the next step or between two. `homes` are the tiers
    that gradients go to, by their parameters' names."""

    held: int = 0
    waiting: int = 0
    update: int = 0
    seconds: float = 0.0
    late: bool = False
    homes: Mapping[str, str] = field(default_factory=dict)

    def step(self, seconds: float) -> float:
        """The seconds of a whole step whose forward and backward take so many."""
        return max(seconds, self.seconds) if self.late else seconds + self.seconds


class ResidentMemoryByShare:
    """The `ResidentMemory` for each of the `shares` of the optimizer's states that may be offloaded, made when it is asked for."""

    def __init__(
        self,
        shares: tuple[float, ...] = (0.0,),
        make: Callable[[float], ResidentMemory] = lambda share: ResidentMemory(),
    ) -> None:
        self.shares = shares
        self._made = functools.cache(make)

    def at(self, share: float | None) -> ResidentMemory:
        """That for a share, by default the first."""
        return self._made(self.shares[0] if share is None else share)


class Keeper(Protocol):
    """Where programs are kept for other processes."""

    def step(self, trace: Any, pattern: frozenset[int], name: str, context: BuildContext) -> Any:
        """What is kept of a step (a `zgraph.build.stored_programs.KeptStep`); None for one that can't be."""


def tell_nobody(program: Program) -> None:
    """Where no other rank compiles the program."""


def own_order(variant: Variant) -> tuple[Start, ...]:
    """Where a program's transfers start in the order that is best for it."""
    return ()


@dataclass(frozen=True, eq=False)
class BuildContext:
    """What all programs of one input signature are built with."""

    plan: Plan
    costs: Costs  # of operators and transfers: schedules and budgets are decided by them
    residents: ResidentMemoryByShare = field(default_factory=ResidentMemoryByShare)
    pass_filter: PassFilter = EVERY_PASS  # fewer passes are for programs that are looked at, and not run by ranks
    groups: dict[str, str] = field(default_factory=dict)  # the names of process groups, by mesh dimension
    agree: Callable[[Program], None] = tell_nobody  # is told of each program before it is compiled
    order: Callable[[Variant], tuple[Start, ...]] = (
        own_order  # of a variant's transfers, where another program's is followed
    )
    keeper: Keeper | None = None  # None: nothing is kept

"""What the programs of a model are built with, besides the model itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from zgraph.build.pass_pipeline import EVERY_PASS, PassFilter, Variant
from zgraph.build.wire_formats import WireChoice
from zgraph.passes.analysis.costs import Costs
from zgraph.passes.overlap.follow_order import Start
from zgraph.plan.plan import Plan
from zgraph.program.program import Program


@dataclass(frozen=True)
class ResidentMemory:
    """The memory that a rank holds besides forward and backward, and the time of its update."""

    held: int = 0  # bytes that are held all the time
    waiting: int = 0  # bytes of `held` that are gradients between micro-batches
    update: int = 0  # bytes of everything at the peak of the update
    seconds: float = 0.0  # the time of the update
    late: bool = False  # whether the update runs beside the next step, not between two
    # the tier that each gradient goes to, by its parameter's name
    homes: Mapping[str, str] = field(default_factory=dict)

    def step(self, seconds: float) -> float:
        """Return the seconds of a whole step whose forward and backward take `seconds`."""
        return max(seconds, self.seconds) if self.late else seconds + self.seconds


class ResidentMemoryByShare:
    """The `ResidentMemory` for each of the `shares` of the optimizer's states that may be offloaded, made when first
    asked for."""

    def __init__(
        self,
        shares: tuple[float, ...] = (0.0,),
        make: Callable[[float], ResidentMemory] = lambda share: ResidentMemory(),
    ) -> None:
        self.shares = shares
        self._made = functools.cache(make)

    def at(self, share: float | None) -> ResidentMemory:
        """Return the `ResidentMemory` for a share, by default the first."""
        return self._made(self.shares[0] if share is None else share)


class Keeper(Protocol):
    """A store of programs for later processes."""

    def step(self, trace: Any, pattern: frozenset[int], name: str, context: BuildContext) -> Any:
        """Return what is kept of a step (a `zgraph.build.stored_programs.StoredStep`); None for a step that can't be
        kept."""


def tell_nobody(program: Program) -> None:
    """Do nothing: for a program that no other rank compiles."""


def own_order(variant: Variant) -> tuple[Start, ...]:
    """Return no order, so that a program's transfers start in the order that is best for it."""
    return ()


@dataclass(frozen=True, eq=False)
class BuildContext:
    """What all programs of one input signature are built with."""

    plan: Plan  # the plan, with its places resolved
    costs: Costs  # of operators and transfers: schedules and memory decisions are made from them
    # what a rank holds besides forward and backward
    residents: ResidentMemoryByShare = field(default_factory=ResidentMemoryByShare)
    pass_filter: PassFilter = EVERY_PASS  # leaves passes out for programs that are only inspected, never run by ranks
    groups: dict[str, str] = field(default_factory=dict)  # the names of process groups, by mesh dimension
    agree: Callable[[Program], None] = tell_nobody  # called with each program before it is compiled
    # the order in which a variant's transfers start, where another program's order is followed
    order: Callable[[Variant], tuple[Start, ...]] = own_order
    keeper: Keeper | None = None  # the store of programs; None to keep nothing
    wire: WireChoice = field(default_factory=WireChoice)  # what `wire.auto` has chosen for the model
    schedule: Costs | None = None  # what transfers are scheduled by, where operators were timed; None: `costs`

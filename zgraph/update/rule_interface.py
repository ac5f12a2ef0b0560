"""The definition of an optimizer: which tensors it keeps for a parameter, and one update as a pure function.

A rule sees this rank's rows of one parameter. Where these are not enough (a norm, a product of whole matrices) it
calls a `Part`, which stands for collectives in the program. Nothing is changed in place: the passes decide where
results go.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from zgraph.plan.optimizers import UpdateKind

# States of a parameter that ranks update by themselves between synchronizations.
SYNCHRONIZED = "synchronized"  # its value after the last one, from the first local step on
LOCAL_STEPS = "local_steps"  # the steps since then, skipped ones excluded


class Part(Protocol):
    """Operations of a rule that reach beyond this rank's rows.

    A sharded parameter's rows are padded with zeros at the end to the same number on every rank; a rule must keep
    padding rows zero (an update of zero gradients and zero states is zero for every rule here).
    """

    shape: tuple[int, ...]
    """The shape of the whole parameter, without padding."""

    def total(self, x: Tensor) -> Tensor:
        """Return the sum (0-dim) of a 0-dim tensor over all ranks that hold rows of the parameter."""

    def whole(self, x: Tensor) -> Tensor:
        """Return the whole tensor, without padding, on every rank, from each rank's rows."""

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's rows of a whole tensor, padded with zeros."""

    def within_rows(self, shape: tuple[int, ...]) -> Tensor | None:
        """Return the positions, in a whole flattened row, of the elements of this rank's row (1-dim int64).

        `shape` is that of the rank's tensor. Returns None where it has whole rows.
        """

    def largest_in_rows(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum of a tensor over the ranks that divide the parameter's rows."""


class Unsharded:
    """The `Part` of a parameter that this rank holds whole."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def total(self, x: Tensor) -> Tensor:
        return x

    def whole(self, x: Tensor) -> Tensor:
        return x

    def own(self, x: Tensor) -> Tensor:
        return x

    def within_rows(self, shape: tuple[int, ...]) -> Tensor | None:
        return None

    def largest_in_rows(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True, slots=True)
class State:
    """A tensor that an optimizer keeps for a parameter."""

    shape: tuple[int, ...]  # its shape on this rank
    dtype: torch.dtype = torch.float32  # its dtype
    fill: float = 0.0  # its first value
    of_rows: bool = False  # it belongs to whole rows: ranks that divide the parameter's rows have the same values
    weight: bool = False  # it is of the weight itself, and has its dtype, whatever that of the plan's states


Update = Callable[
    [Any, Tensor, Tensor, Mapping[str, Tensor], Mapping[str, Tensor], Tensor, Part],
    tuple[Tensor, dict[str, Tensor]],
]


@dataclass(frozen=True)
class Synchronization:
    """How ranks come together that have updated a parameter by themselves.

    `moved(record, param, states, scalars)` is what a rank has to share, `settled(record, param, mean, states, scalars)`
    the new parameter and states, from the ranks' mean of it. Both follow this step's update, also one that was skipped.
    """

    # what this rank shares
    moved: Callable[[Any, Tensor, Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]
    # where all go on from
    settled: Callable[
        [Any, Tensor, Tensor, Mapping[str, Tensor], Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor]]
    ]


@dataclass(frozen=True)
class Unreduced:
    """An update that takes gradients which are not reduced, or within groups of ranks alone.

    In place of a gradient `update` takes the ranks' mean, as it was sent in signs, of what
    `shared(record, grad, states, scalars)` makes of their own gradients; without `shared`, this rank's own gradient.
    """

    update: Update  # the update, as `Rule.update`
    shared: Callable[[Any, Tensor, Mapping[str, Tensor], Mapping[str, Tensor]], Tensor] | None = None  # before it
    synchronization: Synchronization | None = None  # after it


@dataclass(frozen=True)
class Rule:
    """One optimizer.

    `states(record, shape, dtype, whole)` returns the states of a parameter of shape `whole` of which this rank has
    `shape`. `update(record, param, grad, states, scalars, step, part)` returns the new parameter and the new states:
    `scalars` by name and `step` (the number of this update, from 1) are 0-dim float64 tensors. Whether a scalar is
    zero in the record is known when the program is built, so an operation that is skipped for zero costs nothing.

    torch's optimizers that keep no count of updates have had an update where they have the state `begins`.
    """

    # fields of the record that are inputs of the program, "lr", "betas.0": a change never recompiles
    scalars: tuple[str, ...]
    # the states of a parameter
    states: Callable[[Any, tuple[int, ...], torch.dtype, tuple[int, ...]], dict[str, State]]
    update: Update  # one update
    counts: bool = True  # it needs the number of updates that its states have had
    begins: str | None = None  # the state that the first update sets from the gradient alone
    # its updates of other kinds than `UpdateKind.GRADIENTS`
    unreduced: Mapping[UpdateKind, Unreduced] = field(default_factory=dict, compare=False)
    # whether ranks have a state of their own, as the parameter, between synchronizations; None: no rank has
    local: Callable[[str], bool] | None = field(default=None, compare=False)
    apart: bool = False  # whether these states stay their own after a synchronization
    of_round: tuple[str, ...] = ()  # single numbers that are zero when a round of local steps begins

    def first_count(self, kept: Collection[str]) -> float:
        """Return how many updates a parameter with these states has had, where no count was kept: 1 or 0."""
        return 1.0 if self.begins in kept else 0.0

"""What an optimizer is to zgraph: which tensors it keeps for a parameter, and one update as a pure function.

A rule sees this rank's rows of one parameter. Where that is not enough (a norm, a product of whole matrices) it asks a
`Part`, which stands for collectives in the program. Nothing is changed in place: the passes decide where results go.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Part(Protocol):
    """Operations of a rule that reach beyond this rank's rows.

    A sharded parameter's rows are padded with zeros at the end to the same number on every rank; a rule must keep
    padding rows zero (an update of zero gradients and zero states is zero for every rule here).
    """

    shape: tuple[int, ...]
    """The shape of the whole parameter, without padding."""

    def total(self, x: Tensor) -> Tensor:
        """0-dim: the sum of a 0-dim tensor over all ranks that hold rows of the parameter."""

    def whole(self, x: Tensor) -> Tensor:
        """This rank's rows -> the whole tensor, without padding, on every rank."""

    def own(self, x: Tensor) -> Tensor:
        """A whole tensor -> this rank's rows, padded with zeros."""

    def within_rows(self, shape: tuple[int, ...]) -> Tensor | None:
        """Where in a whole row, laid out flat, this rank's elements of one are, whose tensor has this shape (1-dim int64); None where it has
        whole rows."""

    def largest_in_rows(self, x: Tensor) -> Tensor:
        """The largest of each element of a tensor over the ranks that divide the parameter's rows."""


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
    """A tensor that an optimizer keeps for a parameter: its shape on this rank, dtype and first value. `of_rows`: do ranks that divide the
    parameter's rows have the same, which is of the whole rows?"""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    fill: float = 0.0
    of_rows: bool = False


@dataclass(frozen=True)
class AfterFreeze:
    """How an optimizer goes on from its `freeze_steps` on, with gradients that are not reduced.

    `momentum(record, grad, states, scalars)` is this rank's, of its own gradient. Its mean over ranks, as it was sent, is what `update`
    takes in the place of a gradient.
    """

    momentum: Callable[[Any, Tensor, Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]
    update: Callable[
        [Any, Tensor, Tensor, Mapping[str, Tensor], Mapping[str, Tensor], Tensor, Part],
        tuple[Tensor, dict[str, Tensor]],
    ]


@dataclass(frozen=True)
class Rule:
    """One optimizer.

    `scalars` are the fields of its record that are inputs of the program, so that a change never recompiles: "lr",
    "betas.0". `states(record, shape, dtype, whole)` says what it keeps for a parameter of shape `whole` of which this rank has `shape`.
    `update(record, param, grad, states, scalars, step, part)` gives the new parameter and the new states: `scalars` by
    the names above and `step` (the number of this update, from 1) are 0-dim float64 tensors. Whether a scalar is zero in
    the record is known when the program is made, so an operation that is skipped for zero costs nothing.

    A rule that `counts` needs the number of updates that its states have had. `begins` names the state that the first update makes of
    the gradient alone: torch's optimizers keep no number then, and have had an update where they have that state.
    """

    scalars: tuple[str, ...]
    states: Callable[[Any, tuple[int, ...], torch.dtype, tuple[int, ...]], dict[str, State]]
    update: Callable[
        [Any, Tensor, Tensor, Mapping[str, Tensor], Mapping[str, Tensor], Tensor, Part],
        tuple[Tensor, dict[str, Tensor]],
    ]
    counts: bool = True
    begins: str | None = None
    after_freeze: AfterFreeze | None = None

    def first_count(self, kept: Collection[str]) -> float:
        """How many updates a parameter has had of which these states are kept, and no number."""
        return 1.0 if self.begins in kept else 0.0

"""The numbers of an update (learning rates, betas, decay, of each of the optimizer's groups), which must be the same
on all ranks."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

UPDATE_HINT = (
    "every rank needs gradients of the same parameters, and the same numbers and states in its optimizer: "
    "step schedules, and change lr, on all of them"
)


@dataclass(frozen=True)
class Hyperparameters:
    """The numbers of one rank's update, and what else ranks must agree on before it."""

    values: Mapping[tuple[int, str], float] = field(default_factory=dict)  # by (group, "lr" or "betas.0")
    # by parameter: what the user has put into the optimizer's states since the last step, in words
    changed: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""  # what keeps this rank from an update, "" for nothing

    def ballot(self, *, states: bool = True) -> str:
        """Return a text that is equal on ranks with the same numbers; without `states`, also where they hold other
        parameters."""
        packed = struct.pack(f"{len(self.values)}d", *self.values.values())
        return f"numbers {hashlib.sha256(packed).hexdigest()[:16]} {self.told(states=states)}"

    def told(self, *, states: bool = True) -> str:
        """Return what was changed, and the problem, in words."""
        changed = [f"{name}: {what}" for name, what in self.changed.items()] if states else []
        return "; ".join([*changed, self.problem] if self.problem else changed)


def compare_updates(views: Sequence[tuple[str, Hyperparameters]]) -> str | None:
    """Return how ranks' numbers differ if they disagree about an update, or None if the numbers are not the cause."""
    first = views[0][1]
    for rank, (_, other) in enumerate(views):
        for key in first.values.keys() & other.values.keys():
            if struct.pack("d", first.values[key]) != struct.pack("d", other.values[key]):
                number, path = key
                return (
                    f"{path} of group {number} is {first.values[key]} on rank 0 and {other.values[key]} on rank {rank}"
                )
        mine, theirs = first.told(), other.told()
        if mine != theirs:
            return f"the optimizer: {mine or 'nothing changed'} on rank 0, {theirs or 'nothing changed'} on rank {rank}"
    return None


def compare_tied(changes: Sequence[Mapping[str, str]]) -> str | None:
    """Return how ranks differ that changed the states of a parameter which they share, or None if they do not.

    `changes` are, for each rank, what was changed of each parameter that it holds, "" for nothing.
    """
    first: dict[str, tuple[int, str]] = {}
    for rank, changed in enumerate(changes):
        for name, what in changed.items():
            begin, base = first.setdefault(name, (rank, what))
            if what != base:
                said = [f"{w or 'nothing changed'} on rank {r}" for r, w in ((begin, base), (rank, what))]
                return f"the optimizer's state of {name}: {', '.join(said)}"
    return None

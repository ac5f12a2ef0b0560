"""The numbers of an update: learning rates, betas, decay, of each of the optimizer's groups, which all ranks must have alike."""

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
class Numbers:
    """`values` by (group, "lr" or "betas.0"). `changed`: what the user has put into the optimizer's states since the last step, in words, by the
    parameter's name; `problem`: what keeps this rank from an update."""

    values: Mapping[tuple[int, str], float] = field(default_factory=dict)
    changed: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""

    def ballot(self, *, states: bool = True) -> str:
        """The same on ranks with the same numbers. Without `states`: with other parameters, too."""
        packed = struct.pack(f"{len(self.values)}d", *self.values.values())
        return f"numbers {hashlib.sha256(packed).hexdigest()[:16]} {self.told(states=states)}"

    def told(self, *, states: bool = True) -> str:
        """What was changed, and the problem, in words."""
        changed = [f"{name}: {what}" for name, what in self.changed.items()] if states else []
        return "; ".join([*changed, self.problem] if self.problem else changed)


def compare_updates(views: Sequence[tuple[str, Numbers]]) -> str | None:
    """In what ranks differ that disagree about an update; None if it is not their numbers."""
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
    """In what ranks differ that have changed the states of a parameter which they share; None if in nothing. `changes` are for each rank what
    was changed of each parameter that it holds, "" for nothing."""
    first: dict[str, tuple[int, str]] = {}
    for rank, held in enumerate(changes):
        for name, what in held.items():
            begin, base = first.setdefault(name, (rank, what))
            if what != base:
                said = [f"{w or 'nothing changed'} on rank {r}" for r, w in ((begin, base), (rank, what))]
                return f"the optimizer's state of {name}: {', '.join(said)}"
    return None

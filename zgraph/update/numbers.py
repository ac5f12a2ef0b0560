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
    """`values` by (group, "lr" or "betas.0"). `changed`: what the user has put into the optimizer's states since the last step, and what keeps
    this rank from an update, in words."""

    values: Mapping[tuple[int, str], float] = field(default_factory=dict)
    changed: str = ""

    def ballot(self) -> str:
        """The same on ranks with the same numbers."""
        packed = struct.pack(f"{len(self.values)}d", *self.values.values())
        return f"numbers {hashlib.sha256(packed).hexdigest()[:16]} {self.changed}"


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
        if first.changed != other.changed:
            return f"the optimizer: {first.changed or 'nothing changed'} on rank 0, {other.changed or 'nothing changed'} on rank {rank}"
    return None

"""Compare two checkpoints, of whatever systems, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from zgraph.checkpoint.contents import chosen
from zgraph.checkpoint.source import Source
from zgraph.program.tolerance import same_bits

COMPARED = ("steps", "skipped", "samples", "loss_scale")


@dataclass(frozen=True)
class Different:
    """A tensor that differs between two checkpoints."""

    name: str  # its name in both
    why: str  # what differs: shapes, dtypes or numbers
    differing: int | None = None  # how many elements differ; None where shapes do
    elements: int | None = None  # how many elements it has; None where shapes differ
    first: tuple[int, ...] | None = None  # the index of the first element that differs
    largest: float | None = None  # the largest absolute difference; None if not finite
    relative: float | None = None  # ‖a - b‖ / ‖b‖; None if not finite


@dataclass
class Comparison:
    """The differences between two checkpoints."""

    same: int = 0  # how many tensors are equal bit for bit
    different: list[Different] = field(default_factory=list)  # tensors that both have and that differ
    # names that only the first has, and that only the other has
    only: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    # what both say of the run and differ in (`COMPARED`), by its name
    known: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        return not (self.different or self.known or any(self.only))

    def to_json(self) -> dict[str, Any]:
        return {"equal": self.equal} | asdict(self)


def compare(
    one: Source, other: Source, pattern: str | None = None, say: Callable[[str], None] = lambda name: None
) -> Comparison:
    """Compare the tensors (that a glob matches) bit for bit and, without a glob, the runs' counts and loss scales.
    Holds one tensor of each at a time. Raises `FilterError`, and `CheckpointError` for what can't be read."""
    names = chosen(list(one.tensors | other.tensors), pattern)
    comparison = Comparison()
    for name in names:
        presence = [name in source.tensors for source in (one, other)]
        if not all(presence):
            comparison.only[presence.index(False) ^ 1].append(name)
            continue
        say(name)
        different = _difference(name, one, other)
        if different is None:
            comparison.same += 1
        else:
            comparison.different.append(different)
    for key in COMPARED:
        values = getattr(one.known, key), getattr(other.known, key)
        if values[0] != values[1] and None not in values and pattern is None:
            comparison.known[key] = values
    return comparison


def _difference(name: str, one: Source, other: Source) -> Different | None:
    mine, theirs = (source.tensors[name] for source in (one, other))
    if mine.shape != theirs.shape:
        return Different(name, f"it is {list(mine.shape)} and {list(theirs.shape)}")
    a, b = one.whole(name), other.whole(name)
    if same_bits(a, b):
        return None
    why = "other numbers"
    if mine.dtype is not theirs.dtype:
        why = f"it is {str(mine.dtype).removeprefix('torch.')} and {str(theirs.dtype).removeprefix('torch.')}"
    kind = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    x, y = a.to(kind), b.to(kind)
    apart = (x != y) & ~(x.isnan() & y.isnan())
    count = int(apart.sum())
    if not count:
        return Different(name, why, 0, a.numel())
    first = tuple(int(i) for i in apart.nonzero()[0])
    norm, largest = float(y.norm()), float((x - y).abs().max())
    relative = float((x - y).norm()) / norm if norm else float("inf")
    return Different(name, why, count, a.numel(), first, _finite(largest), _finite(relative))


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None

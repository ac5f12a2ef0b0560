"""The changes from one program to another: nodes added, removed, moved and changed, and bytes, time and peak before and
after.

Programs are compared as JSON, which live ones and those of a bundle both have, so no program is loaded. Nodes with
equal names are the same node: passes keep names. Of the nodes in both, the moved ones are the fewest whose removal
leaves the same order in both (the complement of a longest increasing subsequence; Fredman, 1975, "On computing the
length of longest increasing subsequences").
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from zgraph.inspection.snapshot import Figures, Snapshot

_SIZES = {
    "float64": 8,
    "int64": 8,
    "complex64": 8,
    "complex128": 16,
    "float32": 4,
    "int32": 4,
    "uint32": 4,
    "uint64": 8,
}
_VIEWS = {
    f"aten.{name}"
    for name in (
        "alias",
        "as_strided",
        "detach",
        "diagonal",
        "expand",
        "permute",
        "select.int",
        "slice.Tensor",
        "squeeze",
    )
} | {
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.t",
    "aten.transpose.int",
    "aten.unsqueeze",
    "aten.view",
    "operator.getitem",
}
_HALF = ("float16", "bfloat16", "int16", "uint16")


@dataclass(frozen=True)
class Row:
    """A node as the difference shows it."""

    name: str  # its name
    operator: str  # its operator, or its kind if it calls none
    bytes: int  # the bytes that it allocates; 0 for a wait or a view
    role: str  # its role
    of: str  # its parameter or module; "" without one


@dataclass(frozen=True)
class Difference:
    """The changes from one program to another."""

    before: str  # the name of the first
    after: str  # the name of the second
    added: tuple[Row, ...]  # nodes of the second only
    removed: tuple[Row, ...]  # nodes of the first only
    moved: tuple[Row, ...]  # nodes of both at another position
    changed: tuple[Row, ...]  # nodes of both with another operator, operands or type
    figures: tuple[Figures, Figures]  # time and memory before and after; zeros if not simulated
    nodes: tuple[int, int]  # the number of nodes before and after

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes of the values that are gone, and of those that are new."""
        return sum(r.bytes for r in self.removed), sum(r.bytes for r in self.added)

    @property
    def empty(self) -> bool:
        return not (self.added or self.removed or self.moved or self.changed)

    def to_json(self) -> dict[str, Any]:
        rows = {key: [asdict(r) for r in getattr(self, key)] for key in ("added", "removed", "moved", "changed")}
        keys = ("before", "after")
        return {
            **{key: getattr(self, key) for key in keys},
            **rows,
            "bytes": dict(zip(("removed", "added"), self.bytes, strict=True)),
            "nodes": dict(zip(keys, self.nodes, strict=True)),
            "figures": {key: asdict(f) for key, f in zip(keys, self.figures, strict=True)},
        }

    def by_operator(self) -> list[tuple[str, str, int, int]]:
        """Return (what happened, operator and role, number of nodes, bytes), in the order added, removed, moved,
        changed, each the most nodes first."""
        counts: Counter[tuple[str, str]] = Counter()
        size: Counter[tuple[str, str]] = Counter()
        for what in ("added", "removed", "moved", "changed"):
            for row in getattr(self, what):
                key = what, f"{row.operator}{f' ({row.role})' if row.role != 'compute' else ''}"
                counts[key] += 1
                size[key] += row.bytes
        order = ("added", "removed", "moved", "changed")
        ranked = sorted(counts, key=lambda k: (order.index(k[0]), -counts[k], k[1]))
        return [(what, operator, counts[what, operator], size[what, operator]) for what, operator in ranked]


def compare(
    before: Snapshot, after: Snapshot, names: tuple[str, str] | None = None, *, simulate: bool = True
) -> Difference:
    """Return the difference of two programs, under these names (by default their passes'). Without `simulate` its
    figures are zeros."""
    nodes, others = (_named(snapshot) for snapshot in (before, after))
    old = {row["name"]: row for row in nodes}
    new = {row["name"]: row for row in others}
    both = [row["name"] for row in others if row["name"] in old]
    at = {name: i for i, name in enumerate(old)}
    stay = _longest_increasing([at[name] for name in both])
    none = Figures(0.0, 0.0, 0)
    sizes = {**_largest(before), **_largest(after)}
    return Difference(
        *(names or (before.name, after.name)),
        added=tuple(row_of(row, sizes) for name, row in new.items() if name not in old),
        removed=tuple(row_of(row, sizes) for name, row in old.items() if name not in new),
        moved=tuple(row_of(new[name], sizes) for i, name in enumerate(both) if i not in stay),
        changed=tuple(row_of(new[name], sizes) for name in both if _differs(old[name], new[name])),
        figures=(before.figures, after.figures) if simulate else (none, none),
        nodes=(len(nodes), len(others)),
    )


def _largest(snapshot: Snapshot) -> dict[str, int]:
    """Return the upper bound of each size of a program by name; the typical value of a size without a bound."""
    known = snapshot.data.get("sizes", {}).get("symbols", ())
    return {size["name"]: size["typical"] if size["high"] is None else size["high"] for size in known}


def row_of(row: dict[str, Any], sizes: Mapping[str, int]) -> Row:
    """Return the row for a node of a program in JSON, with its bytes at these sizes by name."""
    record = row.get("info", {})
    of = record.get("param") or record.get("module") or ""
    operator = (row["target"] if row["op"] == "call_function" else row["op"]).removesuffix(".default")
    role = record.get("role", "compute")
    size = 0 if role == "wait" or operator in _VIEWS else bytes_of(row.get("val"), sizes)
    return Row(row["name"], operator, size, role, of)


def bytes_of(val: Any, sizes: Mapping[str, int]) -> int:
    """Return the bytes of a value in JSON, a tensor or a tuple of values, at these sizes by name."""
    if isinstance(val, list):
        return sum(bytes_of(one, sizes) for one in val)
    if not isinstance(val, dict):
        return 0
    if "tensor" not in val:
        return bytes_of(val.get("tuple"), sizes)
    size = 1
    for extent in val["tensor"]["shape"]:
        size *= _number(extent, sizes)
    dtype = val["tensor"]["dtype"]
    return size * _SIZES.get(dtype, 2 if dtype in _HALF else 1)


def _number(extent: int | str, sizes: Mapping[str, int]) -> int:
    """Return an extent in JSON as a number; it may be an arithmetic expression in sizes."""
    if isinstance(extent, int):
        return extent
    from zgraph.torch_compat import symbols

    return int(symbols.read(extent, sizes))


def _named(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Return the nodes of a program without its output node, which has a name of its own in each graph."""
    return [row for row in snapshot.data["nodes"] if row["op"] != "output"]


def _differs(old: dict[str, Any], new: dict[str, Any]) -> bool:
    return any(old.get(key) != new.get(key) for key in ("op", "target", "args", "kwargs", "val"))


def _longest_increasing(numbers: list[int]) -> set[int]:
    """Return the positions of a longest increasing subsequence."""
    ends: list[int] = []  # the smallest last number of an increasing subsequence, by its length
    where: list[int] = []
    before = [-1] * len(numbers)
    for i, number in enumerate(numbers):
        length = bisect.bisect_left(ends, number)
        before[i] = where[length - 1] if length else -1
        if length == len(ends):
            ends.append(number)
            where.append(i)
        else:
            ends[length], where[length] = number, i
    positions: set[int] = set()
    i = where[-1] if where else -1
    while i >= 0:
        positions.add(i)
        i = before[i]
    return positions

"""What changed from one program to another: nodes added, removed, moved and changed, bytes, time and peak before and after.

It compares programs as JSON, which both live ones and those of a bundle have: nothing is loaded for it. Nodes are the same if their names
are: passes keep them. Of nodes that both have, those that were moved are the fewest whose removal leaves the same order in both (the
complement of a longest increasing subsequence; Fredman, 1975, "On computing the length of longest increasing subsequences").
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
    """A node as the difference shows it: its operator, the bytes that it makes (none, if it only waits for others' or looks at
    them), what it is for and whose it is."""

    name: str
    operator: str
    bytes: int
    role: str
    of: str


@dataclass(frozen=True)
class Difference:
    """From one program to another. `changed` are nodes whose operator, operands or type are others."""

    before: str
    after: str
    added: tuple[Row, ...]
    removed: tuple[Row, ...]
    moved: tuple[Row, ...]
    changed: tuple[Row, ...]
    figures: tuple[Figures, Figures]
    nodes: tuple[int, int]

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes of the values that are gone, and of those that are new."""
        return sum(r.bytes for r in self.removed), sum(r.bytes for r in self.added)

    @property
    def empty(self) -> bool:
        return not (self.added or self.removed or self.moved or self.changed)

    def to_json(self) -> dict[str, Any]:
        found = {key: [asdict(r) for r in getattr(self, key)] for key in ("added", "removed", "moved", "changed")}
        keys = ("before", "after")
        return {
            **{key: getattr(self, key) for key in keys},
            **found,
            "bytes": dict(zip(("removed", "added"), self.bytes, strict=True)),
            "nodes": dict(zip(keys, self.nodes, strict=True)),
            "figures": {key: asdict(f) for key, f in zip(keys, self.figures, strict=True)},
        }

    def by_operator(self) -> list[tuple[str, str, int, int]]:
        """(what happened, operator and role, how many nodes, bytes), the most first."""
        found: Counter[tuple[str, str]] = Counter()
        size: Counter[tuple[str, str]] = Counter()
        for what in ("added", "removed", "moved", "changed"):
            for row in getattr(self, what):
                key = what, f"{row.operator}{f' ({row.role})' if row.role != 'compute' else ''}"
                found[key] += 1
                size[key] += row.bytes
        order = ("added", "removed", "moved", "changed")
        ranked = sorted(found, key=lambda k: (order.index(k[0]), -found[k], k[1]))
        return [(what, operator, found[what, operator], size[what, operator]) for what, operator in ranked]


def compare(
    before: Snapshot, after: Snapshot, names: tuple[str, str] | None = None, *, simulate: bool = True
) -> Difference:
    """The difference of two programs, called by these names (by default their passes'). Without `simulate` its figures are zeros."""
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
    """The largest sizes of a program by name; of one that nothing bounds the typical one."""
    known = snapshot.data.get("sizes", {}).get("symbols", ())
    return {size["name"]: size["typical"] if size["high"] is None else size["high"] for size in known}


def row_of(row: dict[str, Any], sizes: Mapping[str, int]) -> Row:
    """A node of a program in JSON, with its bytes at these sizes by name."""
    record = row.get("info", {})
    of = record.get("param") or record.get("module") or ""
    operator = (row["target"] if row["op"] == "call_function" else row["op"]).removesuffix(".default")
    role = record.get("role", "compute")
    size = 0 if role == "wait" or operator in _VIEWS else bytes_of(row.get("val"), sizes)
    return Row(row["name"], operator, size, role, of)


def bytes_of(val: Any, sizes: Mapping[str, int]) -> int:
    """Bytes of a value in JSON, at these sizes by name: of a tensor, or of those in a tuple."""
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
    """An extent in JSON, which may be arithmetic on sizes."""
    if isinstance(extent, int):
        return extent
    from zgraph.torch_compat import symbols

    return int(symbols.read(extent, sizes))


def _named(snapshot: Snapshot) -> list[dict[str, Any]]:
    """The nodes of a program but for its output, which is no operator and has a name of its own in each graph."""
    return [row for row in snapshot.data["nodes"] if row["op"] != "output"]


def _differs(old: dict[str, Any], new: dict[str, Any]) -> bool:
    return any(old.get(key) != new.get(key) for key in ("op", "target", "args", "kwargs", "val"))


def _longest_increasing(numbers: list[int]) -> set[int]:
    """The positions of a longest increasing subsequence."""
    ends: list[int] = []  # the smallest end of an increasing run, by its length
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
    found: set[int] = set()
    i = where[-1] if where else -1
    while i >= 0:
        found.add(i)
        i = before[i]
    return found

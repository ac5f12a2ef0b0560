"""What the names of groups mean: a mesh dimension ("dp"), or the ranks at some positions of one ("pp[0,3]").

A rank's group over a dimension is the ranks that differ from it there alone, in order of their positions; a part of it is those of
them at the positions in brackets. A group has one name: positions in order, each once; all of them are the dimension.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from zgraph.errors import MeshError

_PART = re.compile(r"(?P<dim>\w+)\[(?P<positions>\d+(,\d+)*)\]")


def part_of(dim: str, positions: Iterable[int], mesh: Mapping[str, int]) -> str:
    """The name of the group of the ranks at these positions of a mesh dimension.

    Raises `MeshError` for a dimension or a position that the mesh has not, and for fewer than two positions.
    """
    found = sorted(set(positions))
    size = mesh.get(dim, 0)
    if len(found) < 2 or found[0] < 0 or found[-1] >= size:
        raise MeshError(
            f"positions {found} of mesh dimension {dim!r} are no group",
            why=f"the mesh has {dict(mesh)}",
            hint=f"two positions or more, from 0 to {size - 1}" if size else f"dimensions are {list(mesh)}",
        )
    return dim if len(found) == size else f"{dim}[{','.join(map(str, found))}]"


def dim_of(group: str) -> str:
    """The mesh dimension that a group's ranks differ in."""
    return group.partition("[")[0]


def positions_of(group: str, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """Where a group's ranks stand in its dimension. Raises `MeshError` for a name that is no group's of this mesh."""
    if group in mesh:
        return tuple(range(mesh[group]))
    match = _PART.fullmatch(group)
    positions = [int(p) for p in match["positions"].split(",")] if match else []
    if match is None or part_of(match["dim"], positions, mesh) != group:
        raise MeshError(
            f"{group!r} names no group",
            why=f"the mesh has {dict(mesh)}",
            hint='a mesh dimension ("pp"), or some of its positions in order, but not all ("pp[0,3]")',
        )
    return tuple(positions)


def ranks_in(group: str, mesh: Mapping[str, int]) -> int:
    """The number of ranks in a group. Raises `MeshError` for a name that is no group's of this mesh."""
    return len(positions_of(group, mesh))

"""What the names of groups mean: a mesh dimension ("dp"), the ranks at some positions of one ("pp[0,3]"), or blocks of
one ("dp/4").

A rank's group over a dimension is the ranks whose positions differ from its own in this dimension alone, in order. A
part of it is the ranks at the positions in brackets. A block is a fixed number of consecutive ranks; a rank's group is
the block that it is in (the ranks of its node). A group has one name: positions in order, each once; all positions
together are the dimension.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from zgraph.errors import MeshError

_BLOCK = re.compile(r"(?P<dim>\w+)/(?P<size>\d+)")
_PART = re.compile(r"(?P<dim>\w+)\[(?P<positions>\d+(,\d+)*)\]")


def part_of(dim: str, positions: Iterable[int], mesh: Mapping[str, int]) -> str:
    """Return the name of the group of the ranks at these positions of a mesh dimension.

    Raises `MeshError` for a dimension or a position that the mesh has not, and for fewer than two positions.
    """
    members = sorted(set(positions))
    size = mesh.get(dim, 0)
    if len(members) < 2 or members[0] < 0 or members[-1] >= size:
        raise MeshError(
            f"positions {members} of mesh dimension {dim!r} are no group",
            why=f"the mesh has {dict(mesh)}",
            hint=f"two positions or more, from 0 to {size - 1}" if size else f"dimensions are {list(mesh)}",
        )
    return dim if len(members) == size else f"{dim}[{','.join(map(str, members))}]"


def block_of(dim: str, size: int, mesh: Mapping[str, int]) -> str:
    """Return the name of blocks of `size` ranks of a mesh dimension. Raises `MeshError` where blocks do not divide it."""
    ranks = mesh.get(dim, 1)
    if size < 2 or ranks % size:
        raise MeshError(
            f"{ranks} rank(s) of mesh dimension {dim!r} can't be blocks of {size}",
            why=f"the mesh has {dict(mesh)}",
            hint=f"2 or more that divide {ranks}",
        )
    return dim if size == ranks else f"{dim}/{size}"


def dim_of(group: str) -> str:
    """Return the mesh dimension of a group."""
    return group.partition("[")[0].partition("/")[0]


def lines_of(group: str, mesh: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Return the positions, in the mesh dimension, of the ranks of each group of this name: several groups where they
    are blocks.

    Raises `MeshError` for a name that is no group's of this mesh.
    """
    match = _BLOCK.fullmatch(group)
    if match is None:
        return [positions_of(group, mesh)]
    dim, size = match["dim"], int(match["size"])
    if block_of(dim, size, mesh) != group:
        raise _no_group(group, mesh)
    return [tuple(range(at, at + size)) for at in range(0, mesh[dim], size)]


def positions_of(group: str, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """Return the positions of a group's ranks in its mesh dimension; the group is no block.

    Raises `MeshError` for a name that is no group's of this mesh.
    """
    if group in mesh:
        return tuple(range(mesh[group]))
    match = _PART.fullmatch(group)
    positions = [int(p) for p in match["positions"].split(",")] if match else []
    if match is None or part_of(match["dim"], positions, mesh) != group:
        raise _no_group(group, mesh)
    return tuple(positions)


def ranks_in(group: str, mesh: Mapping[str, int]) -> int:
    """Return the number of ranks in a group. Raises `MeshError` for a name that is no group's of this mesh."""
    return len(lines_of(group, mesh)[0])


def _no_group(group: str, mesh: Mapping[str, int]) -> MeshError:
    return MeshError(
        f"{group!r} names no group",
        why=f"the mesh has {dict(mesh)}",
        hint='a mesh dimension ("pp"), some of its positions in order, but not all ("pp[0,3]"), or blocks of it ("dp/4")',
    )

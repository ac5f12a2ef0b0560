"""Which of a model's parameters a rank of a pipeline holds, and which collectives its update shares with other stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from zgraph.errors import MeshError
from zgraph.program.groups import part_of
from zgraph.program.program import STAGE_DIM, ParamSpec


@dataclass(frozen=True)
class OwnedParameters:
    """The parameters that one rank of a pipeline holds."""

    own: frozenset[str]  # names of the parameters on this rank
    stages: int  # number of ranks along "pp"
    # the group ("pp[0,3]") that sums the gradients of a parameter, for those that other ranks hold as well
    tied: Mapping[str, str] = field(default_factory=dict)
    uncounted: frozenset[str] = frozenset()  # parameters of these that another rank counts in the norm
    ties: bool = False  # whether any rank has a parameter that others hold as well


def held_at(position: int, holders: Mapping[str, Collection[int]], stages: int) -> OwnedParameters:
    """Return what the rank at this position of "pp" holds.

    `holders` has, by parameter, the positions of the ranks that hold it; the first of them counts it in the norm.
    Raises `MeshError` for a parameter that no rank holds, or that a position beyond `stages` holds.
    """
    for name, at in holders.items():
        if not at or min(at) < 0 or max(at) >= stages:
            raise MeshError(
                f"parameter {name!r} lies at positions {sorted(at)} of {STAGE_DIM!r}", why=f"there are {stages}"
            )
    tied = {n: part_of(STAGE_DIM, at, {STAGE_DIM: stages}) for n, at in holders.items() if len(set(at)) > 1}
    own = frozenset(n for n, at in holders.items() if position in at)
    elsewhere = frozenset(n for n in own if min(holders[n]) != position)
    return OwnedParameters(own, stages, {n: group for n, group in tied.items() if n in own}, elsewhere, bool(tied))


def specs_here(specs: dict[str, ParamSpec], held: OwnedParameters | None) -> dict[str, ParamSpec]:
    """Return the layouts of this rank's parameters, from those of the whole model: all of them without a pipeline."""
    return specs if held is None else {name: spec for name, spec in specs.items() if name in held.own}


def mesh_of(sizes: dict[str, int], held: OwnedParameters | None) -> dict[str, int]:
    """Return the mesh of this rank's update: stages outermost, then the mesh within a stage; without a pipeline the
    latter alone."""
    return sizes if held is None else {STAGE_DIM: held.stages, **sizes}


def within(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the mesh within a stage, from that of all ranks: the whole mesh without a pipeline."""
    return {name: size for name, size in sizes.items() if name != STAGE_DIM}

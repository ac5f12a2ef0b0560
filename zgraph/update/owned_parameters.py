"""Which of a model's parameters a rank of a pipeline holds, and which collectives its update shares with other stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from zgraph.errors import MeshError, RankMismatchError
from zgraph.program import collectives
from zgraph.program.groups import dim_of, part_of, positions_of
from zgraph.program.node import info, tensor
from zgraph.program.program import STAGE_DIM, ParamSpec, Program


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


def meetings(program: Program) -> dict[str, list[str]]:
    """Return the collectives that an update shares with those of other stages: by group, in order, as one readable
    line each."""
    found: dict[str, list[str]] = {}
    begins: dict[str, fx.Node] = {}  # the first node of each transfer
    for node in program.graph.nodes:
        if node.op == "call_function" and (transfer := info(node).transfer) is not None:
            begins.setdefault(transfer, node)
        if collectives.is_start(node) and dim_of(group := collectives.group_of(node)) == STAGE_DIM:
            taken = node.all_input_nodes[0]
            what = f"{tensor(taken).dtype}{list(tensor(taken).shape)}"
            taken = begins.get(str(info(node).transfer), node).all_input_nodes[0]
            how = f"{collectives.kind(node)} {collectives.reduce_op_of(node)}"
            found.setdefault(group, []).append(f"{how} of {info(taken).param or 'all parameters'}, {what}")
    return found


def check_collective_order(views: Sequence[Mapping[str, list[str]]]) -> None:
    """Raise `RankMismatchError` unless the updates of all stages run the same collectives in every group that they
    share.

    `views[p]` are the `meetings` of the rank at position p of "pp".
    """
    mesh = {STAGE_DIM: len(views)}
    for group in sorted({g for view in views for g in view}):
        members = positions_of(group, mesh)
        first, *others = [views[p].get(group, []) for p in members]
        for position, lines in zip(members[1:], others, strict=True):
            if lines != first:
                at = next((i for i, (a, b) in enumerate(zip(first, lines, strict=False)) if a != b), None)
                at = min(len(first), len(lines)) if at is None else at
                shown = [repr(x[at]) if at < len(x) else "nothing" for x in (first, lines)]
                raise RankMismatchError(
                    "stages disagree about the update",
                    where=f"positions {members[0]} and {position} of {STAGE_DIM!r}, group {group!r}, its collective {at}",
                    why=f"one has {shown[0]}, the other {shown[1]}",
                    hint="a parameter of several stages has a gradient on all of them, or on none: freeze it on all",
                )

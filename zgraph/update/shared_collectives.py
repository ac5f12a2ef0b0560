"""Which collectives a stage's update shares with those of other stages, and whether all have them in one order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from zgraph.errors import RankMismatchError
from zgraph.program import collectives
from zgraph.program.groups import dim_of, positions_of
from zgraph.program.node import info, tensor
from zgraph.program.program import STAGE_DIM, Program


def shared_collectives(program: Program) -> dict[str, list[str]]:
    """Return the collectives that an update shares with those of other stages: by group, in order, as one readable
    line each."""
    by_group: dict[str, list[str]] = {}
    begins: dict[str, fx.Node] = {}  # the first node of each transfer
    for node in program.graph.nodes:
        if node.op == "call_function" and (transfer := info(node).transfer) is not None:
            begins.setdefault(transfer, node)
        if collectives.is_start(node) and dim_of(group := collectives.group_of(node)) == STAGE_DIM:
            taken = node.all_input_nodes[0]
            what = f"{tensor(taken).dtype}{list(tensor(taken).shape)}"
            taken = begins.get(str(info(node).transfer), node).all_input_nodes[0]
            how = f"{collectives.kind(node)} {collectives.reduce_op_of(node)}"
            by_group.setdefault(group, []).append(f"{how} of {info(taken).param or 'all parameters'}, {what}")
    return by_group


def check_collective_order(views: Sequence[Mapping[str, list[str]]]) -> None:
    """Raise `RankMismatchError` unless the updates of all stages run the same collectives in every group that they
    share.

    `views[p]` are the `shared_collectives` of the rank at position p of "pp".
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

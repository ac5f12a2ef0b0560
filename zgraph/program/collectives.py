"""What each collective operator means: which node starts one, which waits for it, over which mesh dimension.

In a program the group argument of a collective is the *name of a mesh dimension* ("dp"), or of a part of one ("pp[0,3]",
see `zgraph.program.groups`), not of a process group.
Programs are so the same on every rank and at every launch; code generation puts the groups' names in.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import fx

from zgraph.program import ops

_functional = torch.ops._c10d_functional

ALL_GATHER = _functional.all_gather_into_tensor.default
GATHER_APART = ops.GATHER  # (into memory made for it; only in what is compiled for gloo)
REDUCE_SCATTER = _functional.reduce_scatter_tensor.default
ALL_REDUCE = _functional.all_reduce.default
ALL_TO_ALL = _functional.all_to_all_single.default
SHIFT = ops.SHIFT  # (to the next rank, or one behind it; an all_to_all once its groups are known)
WAIT = _functional.wait_tensor.default

# Where the group's name and size stand among the arguments of each start.
_GROUP_ARG = {ALL_GATHER: 2, GATHER_APART: 2, REDUCE_SCATTER: 3, ALL_REDUCE: 2, ALL_TO_ALL: 3, SHIFT: 2}
_SIZE_ARG = {ALL_GATHER: 1, GATHER_APART: 1, REDUCE_SCATTER: 2, SHIFT: 1}
_REDUCE_ARG = {REDUCE_SCATTER: 1, ALL_REDUCE: 1}
_KINDS = {
    ALL_GATHER: "all_gather",
    GATHER_APART: "all_gather",
    REDUCE_SCATTER: "reduce_scatter",
    ALL_REDUCE: "all_reduce",
    ALL_TO_ALL: "all_to_all",
    SHIFT: "shift",
}

# One operator for several tensors, by that for one.
COALESCED = {
    ALL_GATHER: _functional.all_gather_into_tensor_coalesced.default,
    REDUCE_SCATTER: _functional.reduce_scatter_tensor_coalesced.default,
    ALL_REDUCE: _functional.all_reduce_coalesced.default,
}


def is_start(node: fx.Node) -> bool:
    """Return whether this node starts a collective."""
    return node.op == "call_function" and node.target in _GROUP_ARG


def is_wait(node: fx.Node) -> bool:
    """Return whether this node waits for a collective."""
    return node.op == "call_function" and node.target is WAIT


def start_of(wait: fx.Node) -> fx.Node:
    """Return the start that a wait ends; where another program started the collective, the placeholder of its value."""
    return wait.all_input_nodes[0]


def wait_of(start: fx.Node) -> fx.Node | None:
    """Return the wait of a start, or None where another program waits for it."""
    return next((u for u in start.users if is_wait(u)), None)


def kind(start: fx.Node) -> str:
    """Return the kind of collective: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "shift"."""
    return _KINDS[start.target]  # type: ignore[index]


def group_of(start: fx.Node) -> str:
    """Return the mesh dimension or part of one (in a program) or process group (in an executable) that a start names."""
    return str(start.args[_GROUP_ARG[start.target]])  # type: ignore[index]


def set_group(start: fx.Node, group: str) -> None:
    start.update_arg(_GROUP_ARG[start.target], group)  # type: ignore[index]


def group_size_of(start: fx.Node) -> int | None:
    """Return the number of ranks that a start has as an argument, or None where its operator takes none."""
    at = _SIZE_ARG.get(start.target)  # type: ignore[call-overload]
    return None if at is None else int(start.args[at])


def reduce_op_of(start: fx.Node) -> str | None:
    """Return the operation of a reduction ("avg", "sum", …); None for another collective."""
    at = _REDUCE_ARG.get(start.target)  # type: ignore[call-overload]
    return None if at is None else str(start.args[at])


def distance_of(shift: fx.Node) -> int:
    """Return how many ranks before a rank the one is whose value it gets."""
    return cast(int, shift.args[3]) if len(shift.args) > 3 else 1


def known_targets() -> tuple[object, ...]:
    """Return all operators that start a collective."""
    return tuple(_GROUP_ARG)

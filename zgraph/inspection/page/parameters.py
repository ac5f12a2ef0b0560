"""The parameters of a program as rows of the page's table: layout, bytes, how often gathered, how reduced, where
used."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from zgraph.passes.analysis.costs import computes, most_bytes
from zgraph.program import collectives, transfers_to_host
from zgraph.program.node import Phase, Role, info
from zgraph.program.program import InputRole, OutputRole, ParamSpec, Program

_CARRIES = (Role.GATHER, Role.FETCH, Role.WAIT, Role.LAYOUT)  # roles of the nodes between a weight and its readers


@dataclass
class _Uses:
    """The uses of one parameter in a program."""

    gathers: Counter[Phase] = field(default_factory=Counter)  # how often it is gathered, by phase
    fetches: int = 0  # how often it is fetched from its tier
    reductions: list[str] = field(default_factory=list)  # how its gradient is reduced, one text for each start
    readers: list[fx.Node] = field(default_factory=list)  # the nodes that compute with it, in order


def parameters_of(program: Program, update: Program | None) -> list[dict[str, Any]]:
    """Return a row for each parameter, in the model's order. The bytes of optimizer states are those of the program
    `update`'s inputs."""
    uses, states = _uses(program), _states(update)
    unsharded = {port.name for port in program.outputs if port.role is OutputRole.UNSHARDED}
    unsharded |= {port.name for port in program.inputs if port.role in (InputRole.UNSHARDED, InputRole.IN_FLIGHT)}
    return [
        _row(spec, uses[spec.name], states.get(spec.name, 0), spec.name in unsharded)
        for spec in program.params.values()
    ]


def _row(spec: ParamSpec, uses: _Uses, states: int, kept: bool) -> dict[str, Any]:
    shard_elements = math.prod(spec.shard_shape)
    return {
        "name": spec.name,
        "shape": list(spec.whole_shape),
        "elements": math.prod(spec.whole_shape),
        "dtype": _short(spec.dtype),
        "compute": _short(spec.compute_dtype),
        "layout": _layout(spec),
        "rows": spec.rows if spec.shard_dim else None,
        "bytes": shard_elements * spec.dtype.itemsize,
        "gradient": shard_elements * spec.grad_dtype.itemsize if spec.requires_grad else 0,
        "states": states,
        "home": spec.home or "device",
        "forward": uses.gathers[Phase.FORWARD],
        "backward": uses.gathers[Phase.BACKWARD],
        "fetches": uses.fetches,
        "between": _between(spec, uses, kept),
        "reduction": ", ".join(dict.fromkeys(uses.reductions)) or ("none" if spec.requires_grad else "frozen"),
        "first": uses.readers[0].name if uses.readers else "",
        "last": uses.readers[-1].name if uses.readers else "",
    }


def _layout(spec: ParamSpec) -> str:
    by = spec.division
    placements = [f"Shard({by.dim}) over {by.mesh_dim}"] if by is not None else []
    placements += [f"Shard(0) over {spec.shard_dim}"] if spec.shard_dim else []
    return ", ".join(placements) or "whole"


def _between(spec: ParamSpec, uses: _Uses, kept: bool) -> str:
    """Return what happens to the unsharded parameter between its uses."""
    if spec.shard_dim is None:
        return "always whole" if spec.division is None else "always in parts"
    if kept:
        return "kept until weights change"
    if not uses.gathers:
        return "never gathered"
    late = any(info(node).phase is Phase.BACKWARD for node in uses.readers)
    if uses.gathers[Phase.FORWARD] and late and not uses.gathers[Phase.BACKWARD]:
        return "kept for the backward"
    return "released after use"


def _uses(program: Program) -> defaultdict[str, _Uses]:
    uses: defaultdict[str, _Uses] = defaultdict(_Uses)
    carried: dict[fx.Node, set[str]] = {}  # the parameters that a node's value is a gathered, cast or viewed form of
    for port, node in program.input_items():
        name = info(node).param or port.name
        if port.role in (InputRole.PARAMETER, InputRole.UNSHARDED, InputRole.IN_FLIGHT) and name in program.params:
            carried[node] = {name}
    for node in program.graph.nodes:
        if node.op == "output":
            break
        record = info(node)
        if record.param is not None:
            _count(node, uses[record.param])
        names = set().union(*(carried.get(a, ()) for a in node.all_input_nodes))
        if not names or record.role is Role.RELEASE:
            continue
        if (record.role in _CARRIES and record.param in names) or not computes(node):
            carried[node] = names
            continue
        for name in names:
            uses[name].readers.append(node)
    return uses


def _count(node: fx.Node, uses: _Uses) -> None:
    record = info(node)
    if node.target is transfers_to_host.FETCH:
        uses.fetches += 1
    elif not collectives.is_start(node):
        return
    elif record.role is Role.GATHER:
        uses.gathers[record.phase] += 1
    elif record.role is Role.REDUCE:
        how = collectives.reduce_op_of(node)
        uses.reductions.append(f"{collectives.kind(node)}{f' {how}' if how else ''} over {record.mesh_dim}")


def _states(update: Program | None) -> dict[str, int]:
    """Return the bytes of optimizer states by parameter: a state is called "parameter/name"."""
    sizes: Counter[str] = Counter()
    for port, node in update.input_items() if update is not None else ():
        if port.role is InputRole.STATE:
            sizes[port.name.rpartition("/")[0]] += most_bytes(node)
    return sizes


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")

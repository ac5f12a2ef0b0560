"""Which parameters an update treats together: those with equal graphs are one kernel's work.

An update does the same to each parameter, and a model's parameters come in few shapes. So its program is cut into
stages (numbers; each gradient's share of the norm; the norm; each parameter's update), and a stage into groups of
parameters with equal graphs. Of offloaded states, those of one group are on the device at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zgraph.passes.analysis.costs import size_of
from zgraph.passes.contract import graph_pass
from zgraph.program import collectives
from zgraph.program.aliases import aliases_of, is_write
from zgraph.program.node import info, set_info, value
from zgraph.program.program import Fact, Program

GROUP = 16  # parameters: calls cost below 1% then (benchmarks/update.py)
LIMITS = (2**20, 2**28)  # bytes


@dataclass(frozen=True)
class GroupOptions:
    """Options of `group_updates`."""

    first: tuple[str, ...] = ()  # names of the parameters that are updated as early as they can be, in this order
    # the most bytes of a group's offloaded inputs (one parameter's may have more); None: a 16th of all, within LIMITS
    bytes: int | None = None


@graph_pass(
    "group_updates",
    "parameters that need the same are updated together, group by group",
    options=GroupOptions,
    requires=(Fact.IN_PLACE,),
    provides=(Fact.GROUPED,),
    conflicts=(Fact.GROUPED,),
)
def group_updates(program: Program, options: GroupOptions) -> dict[str, int]:
    groups = _cut(program, options)
    output = program.output_node()
    for number, nodes in enumerate(groups):
        for node in nodes:
            set_info(node, info(node).replace(group=f"group{number}"))
            output.prepend(node)
    return {"groups": len(groups)}


def default_bytes(away: int) -> int:
    """Return the most bytes that one group brings to the device, of `away` offloaded bytes, if the plan does not say."""
    return min(max(away // 16, LIMITS[0]), LIMITS[1])


def groups_of(program: Program) -> list[list[fx.Node]]:
    """Return the operators of each group, in the order in which they run."""
    groups: dict[str, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function":
            groups.setdefault(str(info(node).group), []).append(node)
    return list(groups.values())


def _cut(program: Program, options: GroupOptions) -> list[list[fx.Node]]:
    """Return the nodes of each group, groups in an order in which they can run."""
    by_stage: dict[int, dict[str | None, list[fx.Node]]] = {}
    stages = _stages(program)
    for node in program.graph.nodes:
        if node in stages:
            by_stage.setdefault(stages[node], {}).setdefault(info(node).param, []).append(node)
    groups: list[list[fx.Node]] = []
    limit = options.bytes
    if limit is None:
        limit = default_bytes(sum(size_of(n) for n in program.placeholders() if info(n).home is not None))
    rank = {name: at for at, name in enumerate(options.first)}
    for stage in sorted(by_stage):
        kinds: dict[str, list[list[fx.Node]]] = {}
        for _, nodes in sorted(by_stage[stage].items(), key=lambda item: rank.get(str(item[0]), len(rank))):
            kinds.setdefault(_kind(nodes), []).append(nodes)
        for alike in kinds.values():
            size = max(_away(nodes) for nodes in alike)
            together = min(GROUP, max(1, limit // size)) if size else GROUP
            for at in range(0, len(alike), together):
                groups.append([n for nodes in alike[at : at + together] for n in nodes])
    return groups


def _away(nodes: list[fx.Node]) -> int:
    """Return the bytes of the offloaded values that these nodes read."""
    return sum(size_of(a) for a in {a for n in nodes for a in n.all_input_nodes} if info(a).home is not None)


def _stages(program: Program) -> dict[fx.Node, int]:
    """Return each operator's stage: even ones are of all parameters together, odd ones of each parameter by itself.

    Numbers are computed as early as they can be, a parameter's own values as late: what two stages share is memory that
    lives between them, and is written and read once more. Collectives of all parameters together keep their order:
    ranks of other pipeline stages, whose programs differ from this one, are in them too.
    """
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    own = {n: int(info(n).param is not None) for n in nodes}
    early: dict[fx.Node, int] = {}
    met = 0
    for node in nodes:
        stage = max([early[a] for a in node.all_input_nodes if a in early], default=0)
        early[node] = stage + (stage + own[node]) % 2
        if collectives.is_start(node) and not own[node]:
            early[node] = met = max(met, early[node])
    last = max([early[n] for n in nodes if own[n]], default=1)
    stages: dict[fx.Node, int] = {}
    for node in reversed(nodes):
        if is_write(node):
            continue
        users = [u for u in node.users if u in stages]
        late = min([stages[u] - (own[u] != own[node]) for u in users], default=last)
        stages[node] = late if own[node] else early[node]
    for node in nodes:
        if is_write(node):  # no reader of the old value may come in a later stage
            place, new = node.all_input_nodes[0], node.all_input_nodes[-1]
            readers = [u for alias in aliases_of(place) for u in alias.users]
            stage = max([stages[n] for n in [new, *readers] if n in stages], default=0)
            stages[node] = stage + (stage + own[node]) % 2
    return stages


def _kind(nodes: list[fx.Node]) -> str:
    """Return a text that is equal for groups of nodes that compute the same from values of the same types in the same
    tiers.
    """
    at: dict[fx.Node, str] = {}

    def name(node: fx.Node) -> str:
        if node not in at:
            shared = node.op != "placeholder" and info(node).param is None
            home = info(node).home if node.op == "placeholder" else None
            at[node] = f"{node.name if shared else len(at)}:{type_text(value(node))}:{home}"
        return at[node]

    lines = []
    for node in nodes:
        args = repr(fx.node.map_arg((node.args, node.kwargs), lambda n: name(n)))
        lines.append(f"{name(node)} = {node.target} {args}")
    return "\n".join(lines)


def type_text(val: Any) -> str:
    """Return a tensor's dtype, shape, strides and device as text; the name of any other type."""
    return (
        f"{val.dtype}{list(val.shape)}{list(val.stride())}{val.device.type}"
        if isinstance(val, torch.Tensor)
        else str(type(val))
    )

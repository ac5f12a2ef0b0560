"""The values on the device at each node of a program, and the bytes that each takes.

Inputs are live for as long as the program runs, other values until their last reader, also when it reads them through
views; what is stored in other memory or on disk (`NodeInfo.home`) takes none.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from dataclasses import dataclass

from torch import fx

from zgraph.passes.analysis.costs import most_bytes, own_bytes
from zgraph.passes.analysis.fusion import pointwise, positions, sources
from zgraph.program import collectives, transfers_to_host
from zgraph.program.attention_memory import working_bytes
from zgraph.program.node import Phase, Role, info
from zgraph.program.program import InputRole, OutputRole, Port, Program

_INPUTS = {
    InputRole.PARAMETER: "parameters",
    InputRole.STATE: "states",
    InputRole.RESIDUAL: "residuals",
    InputRole.UNSHARDED: "gathered",
    InputRole.GRADIENT: "gradients",
    InputRole.ACCUMULATOR: "gradients",
    InputRole.SAVED: "activations",
    InputRole.RECEIVED: "activations",
    InputRole.RETURNED: "activations",
}


CATEGORIES = (*dict.fromkeys(_INPUTS.values()), "inputs", "fetched", "temporaries", "outputs")


@dataclass(frozen=True, eq=False)
class Life:
    """A value's memory on the device, and the positions of the program at which it is live."""

    node: fx.Node  # the node that owns the storage
    category: str  # one of `CATEGORIES`
    bytes: int  # its size, at the program's largest sizes
    born: int  # the first position at which it is live
    gone: int  # the first position at which it is no longer live
    read: int  # the position of its last reader; its own if it has none


def memory_of(program: Program, fused: bool = False) -> list[dict[str, int]]:
    """Return the live bytes by category at each node, in order, with what it takes while it runs. `fused`: see `lives`."""
    changes: list[Counter[str]] = [Counter() for _ in range(len(program.graph.nodes) + 2)]
    for life in lives(program, fused):
        changes[life.born][life.category] += life.bytes
        changes[life.gone][life.category] -= life.bytes
    for at, node in enumerate(program.graph.nodes):
        if used := working_bytes(node):
            changes[at]["temporaries"] += used
            changes[at + 1]["temporaries"] -= used
    live: Counter[str] = Counter()
    live_bytes = []
    for change in changes[:-2]:
        live.update(change)
        live_bytes.append(dict(live))
    return live_bytes


def idle_bytes(program: Program) -> int:
    """Return the bytes of parameters on the device that are no inputs of the program: they take memory all the same."""
    taken = {port.name for port in program.inputs if port.role is InputRole.PARAMETER}
    idle = (s for s in program.params.values() if s.name not in taken and s.home is None)
    return sum(math.prod(s.shard_shape) * s.dtype.itemsize for s in idle)


def lives(program: Program, fused: bool = False) -> list[Life]:
    """Return every value that takes memory of the device, in the order of the nodes.

    `fused` says whether the backend fuses: what stays inside a kernel then takes none, and a kernel's result replaces
    an operand whose last reader it is.
    """
    nodes = list(program.graph.nodes)
    on = sources(nodes, fused)
    at = positions(nodes, on, fused)
    last: dict[fx.Node, int] = {}
    read: dict[fx.Node, int] = {}
    backward: set[fx.Node] = set()
    born = dict(at)
    for node in nodes:
        if node.target is operator.getitem and on[node] == (node,):  # allocated by the operator with several results
            born[node] = born[node.all_input_nodes[0]]
        if fused and on[node] != (node,) and node.op == "call_function":
            continue  # (a view, or inside a kernel: its readers read the storage)
        for used in (s for a in node.all_input_nodes for s in on[a]):
            last[used] = max(last.get(used, 0), at[node])
            if node.op != "output":
                read[used] = last[used]
            if info(node).phase is Phase.BACKWARD:
                backward.add(used)
        for own in on[node]:
            last.setdefault(own, at[node])
    categories = {node: _INPUTS.get(port.role, "inputs") for port, node in program.input_items()}  # type: ignore[arg-type]
    output_ports = {root: p for p, n in program.output_items() if n in on for root in on[n]}
    all_lives: list[Life] = []
    for node in nodes:
        if on[node] != (node,) or node.op == "output" or info(node).home is not None:
            continue
        category = categories.get(node) or _category(node, output_ports, node in backward)
        gone = len(nodes) + 1
        if node not in categories and last[node] < len(nodes) and node not in output_ports:
            replaced = fused and _replaced(nodes[last[node]], node, on)
            gone = last[node] + (not replaced)
        all_lives.append(Life(node, category, own_bytes(node), born[node], gone, read.get(node, at[node])))
    return all_lives


def _replaced(reader: fx.Node, value: fx.Node, on: dict[fx.Node, tuple[fx.Node, ...]]) -> bool:
    """Return whether the result of its last reader overwrites `value`. (Inductor does so within a phase, in a pointwise
    kernel.)
    """
    if (
        on[reader] != (reader,)
        or not pointwise(reader)
        or value.op == "placeholder"
        or most_bytes(reader) != most_bytes(value)
    ):
        return False
    if info(value).phase is not info(reader).phase:
        return False
    dying = [s for a in reader.all_input_nodes for s in on[a] if most_bytes(s) == most_bytes(value) and _made_here(s)]
    return bool(dying) and value is dying[0]


def _made_here(value: fx.Node) -> bool:
    """Return whether a kernel of the program allocated this memory. (Inductor overwrites no other.)"""
    return value.op != "placeholder" and value.target is not transfers_to_host.FETCH


def _category(node: fx.Node, given: dict[fx.Node, Port], read_in_backward: bool) -> str:
    record = info(node)
    if node.target is transfers_to_host.FETCH:
        return "fetched"
    if collectives.is_start(node) and record.role is Role.GATHER:
        return "gathered"
    port = given.get(node)
    if port is not None and port.role is OutputRole.GRADIENT:
        return "gradients"
    saved = port is not None and port.role is OutputRole.SAVED
    if saved or (record.phase is Phase.FORWARD and read_in_backward):
        return "activations"
    return "outputs" if port is not None else "temporaries"

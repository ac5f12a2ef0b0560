"""Tells whether two programs compute the same and differ only in when transfers start and are awaited.

*Belief.* A program that only starts and awaits its transfers elsewhere gives the same numbers, bit for bit. So
operators must come in one order in both, and read the same values; transfers, the layout nodes around them, views and
marks of release may stand anywhere (the verifier says where they may not), but must be the same ones.

A node is known by what it does to which values, whatever it is called: names depend on the order in which passes made
the nodes.
"""

from __future__ import annotations

from collections import Counter

from torch import fx

from zgraph.passes.analysis.costs import computes
from zgraph.program import ops
from zgraph.program.node import Role, info
from zgraph.program.program import Program


def difference(one: Program, other: Program) -> str | None:
    """Return what the second program does otherwise, as the name of a node; None if it only moves transfers."""
    numbers: dict[str, int] = {}
    first, second = _numbered(one, numbers), _numbered(other, numbers)
    in_order = [[n for n in numbered if _stays(n)] for numbered in (first, second)]
    for mine, theirs in zip(*in_order, strict=False):
        if first[mine] != second[theirs]:
            return theirs.name
    if len(in_order[0]) != len(in_order[1]):
        return max(in_order, key=len)[min(map(len, in_order))].name
    more = Counter(second.values()) - Counter(first.values())
    if more or Counter(first.values()) - Counter(second.values()):
        return next((n.name for n, number in second.items() if number in more), "a node that is not there any more")
    results = [
        [(port, numbered[node]) for port, node in program.output_items()]
        for program, numbered in ((one, first), (other, second))
    ]
    return None if results[0] == results[1] else other.output_node().name


def _stays(node: fx.Node) -> bool:
    return computes(node) and info(node).role is not Role.LAYOUT


def _numbered(program: Program, numbers: dict[str, int]) -> dict[fx.Node, int]:
    """Return a number for each node that has an effect, equal for nodes that do the same to the same values; `numbers`
    has those given so far, by what the nodes do."""
    numbered: dict[fx.Node, int] = {}
    for port, node in program.input_items():
        numbered[node] = numbers.setdefault(f"{port.role} {port.name} {port.index}", len(numbers))
    for node in program.graph.nodes:
        if node.op in ("placeholder", "output") or node.target is ops.RELEASE:
            continue
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{numbered[n]}")
        record = info(node)
        place = str(record.phase) if _stays(node) else ""
        text = f"{node.op} {node.target} {arguments!r} {place} {record.bucket} {record.home}"
        numbered[node] = numbers.setdefault(text, len(numbers))
    return numbered

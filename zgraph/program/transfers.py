"""Marks the nodes of one transfer.

A transfer is a collective that gathers a parameter or reduces a gradient, its wait, the layout nodes around both, and
the release of what it gathers; or a collective over parts of a value that ranks compute together, and its wait. The
pass that inserts them gives all of them the same `NodeInfo.transfer`, the name of the collective's start.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from zgraph.program import collectives
from zgraph.program.node import Role, info, set_info
from zgraph.program.program import Program

_SERVING = (Role.WAIT, Role.LAYOUT)


def mark_transfers(nodes: Sequence[fx.Node]) -> None:
    """Set the transfer of nodes that were made for one parameter, in order.

    A wait belongs to the start before it, a layout node to the next start, or to the last.
    """
    starts = [node for node in nodes if collectives.is_start(node)]
    if not starts:
        return
    passed = 0
    for node in nodes:
        passed += node in starts
        ahead = passed if info(node).role is Role.LAYOUT else passed - 1
        if node in starts or info(node).role in _SERVING:
            set_info(node, info(node).replace(transfer=starts[min(ahead, len(starts) - 1)].name))


def mark_exchange(node: fx.Node) -> None:
    """Set the transfer of an exchange's start, or of its wait. Other nodes stay as they are."""
    if collectives.is_start(node) and info(node).role is Role.EXCHANGE:
        set_info(node, info(node).replace(transfer=node.name))
    elif collectives.is_wait(node) and info(start := collectives.start_of(node)).role is Role.EXCHANGE:
        set_info(node, info(node).replace(transfer=start.name))


def mark_by_graph(program: Program) -> None:
    """Mark all transfers of a program by the nodes around each start: for programs written before records had
    `transfer`."""
    for start in program.graph.nodes:
        mark_exchange(start)
        if collectives.is_start(start) and info(start).role in (Role.GATHER, Role.REDUCE):
            for node in _around(start):
                set_info(node, info(node).replace(transfer=start.name))


def _around(start: fx.Node) -> list[fx.Node]:
    """Return a start, its wait, the layout nodes that serve it alone, and the release of what it gathers."""
    nodes = [start]
    operand = start.all_input_nodes[0]
    while operand.op == "call_function" and info(operand).role is Role.LAYOUT and len(operand.users) == 1:
        nodes.append(operand)
        operand = operand.all_input_nodes[0]
    at = collectives.wait_of(start)
    while at is not None:
        nodes.append(at)
        releases = [user for user in at.users if user.op != "output" and info(user).role is Role.RELEASE]
        readers = [user for user in at.users if user not in releases]
        nodes += releases
        only = readers[0] if len(readers) == 1 and readers[0].op != "output" else None
        at = only if only is not None and info(only).role is Role.LAYOUT else None
    return nodes

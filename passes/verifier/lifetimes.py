"""Rules about where values are stored and how long: transfers to and from the host, and gathered buffers after their release."""

from __future__ import annotations

from torch import fx

from zgraph.passes.verifier.faults import Faults, awaited_once, fault
from zgraph.program import collectives, ops, transfers_to_host
from zgraph.program.aliases import root_of
from zgraph.program.node import Phase, Role, info, tensors
from zgraph.program.program import Fact, Level, Program


def check_host_transfers(program: Program) -> Faults:
    """Check that each move is waited for once, by a wait that keeps alive what is moved, and that nothing reads a value
    while it moves or where it is offloaded.
    """
    for node in program.graph.nodes:
        if transfers_to_host.is_start(node):
            waits = [u for u in node.users if transfers_to_host.is_wait(u)]
            # (a later part of the update may wait for it)
            handed_on = program.level is Level.EXECUTABLE and not waits and program.output_node() in node.users
            yield from awaited_once(program, node, waits, "move", handed_on=handed_on)
            if waits and waits[0].args[1] is not transfers_to_host.moved_value(node):
                yield fault(
                    program,
                    waits[0],
                    f"{waits[0].name!r} lets go of what {node.name!r} moves",
                    "its memory could be used again before the move is over",
                )
        came_in = (
            program.level is Level.EXECUTABLE and node.all_input_nodes and node.all_input_nodes[0].op == "placeholder"
        )
        if (
            transfers_to_host.is_wait(node)
            and not transfers_to_host.is_start(transfers_to_host.start_of(node))
            and not came_in
        ):
            yield fault(program, node, f"node {node.name!r} waits for no move", f"{node.args[0]} starts none")
        if (
            Fact.OFFLOADED in program.facts
            and node.op == "call_function"
            and not transfers_to_host.is_host_transfer(node)
        ):
            away = next((a for a in node.all_input_nodes if info(a).home is not None and not _on_host(node, a)), None)
            if away is not None:
                yield fault(
                    program,
                    node,
                    f"node {node.name!r} reads {away.name!r}, which lies in {info(away).home}",
                    "only a fetch brings it to the device",
                )


def _on_host(node: fx.Node, read: fx.Node) -> bool:
    """Return whether an update's node and the value that it reads are both in host memory."""
    there = all(t.device.type == "cpu" for t in tensors(node))
    return info(node).phase is Phase.UPDATE and info(read).home == "cpu" and there


def check_releases(program: Program) -> Faults:
    """Check that nothing reads a gathered buffer, or a view of it, after its release, and that each is released at most
    once.
    """
    released: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        for used in node.all_input_nodes if released else ():
            root = root_of(used)
            if root in released:
                yield fault(
                    program,
                    node,
                    f"node {node.name!r} reads {used.name!r} after its release",
                    f"{released[root].name!r} released {root.name!r}",
                )
        if node.op == "call_function" and node.target is ops.RELEASE:
            buffer = node.args[0]
            if not (
                isinstance(buffer, fx.Node)
                and collectives.is_wait(buffer)
                and info(collectives.start_of(buffer)).role is Role.GATHER
            ):
                yield fault(
                    program,
                    node,
                    f"node {node.name!r} releases {buffer}, which was not gathered",
                    "only gathered buffers are released",
                )
            released[buffer] = node

"""Rules about the order of nodes, their phases, and what they may not do: repeat a random operator, write to an argument."""

from __future__ import annotations

from torch import fx

from zgraph.passes.verifier.faults import Faults, fault
from zgraph.program import transfers_to_host
from zgraph.program.aliases import is_feedback, is_random, is_write, mutates, root_of
from zgraph.program.node import Phase, has_info, info
from zgraph.program.program import Program


def check_order(program: Program) -> Faults:
    """Check that every value is defined before it is used (so there is no cycle), and that every node has its record."""
    seen: set[fx.Node] = set()
    for node in program.graph.nodes:
        for used in node.all_input_nodes:
            if used not in seen:
                yield fault(
                    program,
                    node,
                    f"node {node.name!r} uses {used.name!r} before it is defined",
                    "the order is broken or the graph has a cycle",
                )
        if node.op != "output" and not has_info(node):
            yield fault(
                program,
                node,
                f"node {node.name!r} has no record",
                "a pass inserted it without saying what it is",
            )
        seen.add(node)


def check_phases(program: Program) -> Faults:
    """Check that the forward uses nothing of the backward."""
    for node in program.graph.nodes:
        if node.op == "output" or info(node).phase is not Phase.FORWARD:
            continue
        for used in node.all_input_nodes:
            if info(used).phase is Phase.BACKWARD:
                yield fault(
                    program,
                    node,
                    f"node {node.name!r} of the forward uses {used.name!r} of the backward",
                    "a forward value can't wait for the backward",
                )


def check_random(program: Program) -> Faults:
    """Check that no random operator is repeated: it would draw other numbers."""
    for node in program.graph.nodes:
        if node.op != "output" and info(node).copy_of is not None and is_random(node):
            yield fault(
                program,
                node,
                f"random operator {node.name!r} repeats {info(node).copy_of!r}",
                "it would draw other numbers than the forward did",
            )


def check_mutation(program: Program) -> Faults:
    """Check that no operator writes to its arguments, except the two that may.

    An update's last step writes an input that nothing reads after it (or the fetched copy of one, which is then
    stored). An operator that sends a gradient with error feedback writes the new residual into an input that nothing
    else reads.
    """
    written: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        for used in node.all_input_nodes if written else ():
            root = root_of(used)
            if root in written and not (transfers_to_host.is_host_transfer(node) and used.op != "placeholder"):
                yield fault(
                    program,
                    node,
                    f"node {node.name!r} reads {root.name!r} after it was written",
                    f"{written[root].name!r} put its new value there",
                )
        if is_write(node):
            written[node.all_input_nodes[0]] = node
        elif mutates(node) and not is_feedback(node):
            yield fault(
                program,
                node,
                f"node {node.name!r} changes its argument",
                f"{node.target} writes in place; programs are functional",
            )

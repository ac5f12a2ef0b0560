"""The values that are saved by the forward for the backward, by storage; and how the backward reads one that was moved
or recomputed.

A storage is saved once, however many views of it the backward reads: the views are made again from the storage.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from zgraph.program import collectives, transfers_to_host
from zgraph.program.aliases import root_of
from zgraph.program.node import Phase, Role, info, value
from zgraph.program.program import Program
from zgraph.program.sizes import is_symbolic

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Crossing:
    """A storage of the forward that the backward reads."""

    root: fx.Node  # the node that owns the storage
    readers: dict[fx.Node, list[fx.Node]]  # the backward's readers of the root and of each view of it, in graph order

    @property
    def first(self) -> fx.Node:
        """The first reader in the backward."""
        return min(users[0] for users in self.readers.values())

    def read_instead(self, program: Program, back: fx.Node, made_by: str) -> None:
        """Let the backward read `back`, which equals the root, and views of it, and erase the forward's views that
        nothing reads any more.
        """
        copies = {self.root: back}

        def again(view: fx.Node) -> fx.Node:
            if view not in copies:
                for used in view.all_input_nodes:
                    if not is_symbolic(value(used)):  # (both phases have the sizes)
                        again(used)
                copies[view] = program.repeat(view, copies, made_by)
            return copies[view]

        with program.graph.inserting_before(self.first):
            for view in self.readers:
                again(view)
        for view, users in self.readers.items():
            for user in users:
                user.replace_input_with(view, copies[view])
        for view in sorted(copies, reverse=True):
            if view is not self.root and not view.users:
                program.graph.erase_node(view)


def crossings(program: Program) -> list[Crossing]:
    """Return the storages that the backward reads, without those of outputs, in graph order of the first value that is
    read.
    """
    output_roots = {root_of(n) for _, n in program.output_items()}
    reads_by_root: dict[fx.Node, dict[fx.Node, list[fx.Node]]] = {}
    for node in program.graph.nodes:
        if node.op == "output" or info(node).phase is not Phase.FORWARD:
            continue
        if (late := sorted(u for u in node.users if _reads_late(u))) and (root := root_of(node)) not in output_roots:
            reads_by_root.setdefault(root, {})[node] = late
    return [Crossing(root, readers) for root, readers in reads_by_root.items()]


def made_by_forward(root: fx.Node) -> bool:
    """Return whether a value is the forward's own and dense: no input, no gathered weight, no move."""
    val = value(root)
    if root.op != "call_function" or not isinstance(val, torch.Tensor) or transfers_to_host.is_host_transfer(root):
        return False
    if collectives.is_start(root) or info(root).role is Role.LAYOUT:
        return False
    if collectives.is_wait(root) and info(collectives.start_of(root)).role is not Role.EXCHANGE:
        return False
    return bool(aten.is_non_overlapping_and_dense(val))


def part_phases(program: Program) -> None:
    """Move all nodes of the forward before the backward's first node, as they are in the two programs."""
    nodes = [n for n in program.graph.nodes if n.op in ("call_function", "get_attr")]
    turn = next((n for n in nodes if info(n).phase is Phase.BACKWARD), None)
    if turn is not None:
        for node in nodes[nodes.index(turn) :]:
            if info(node).phase is Phase.FORWARD:
                turn.prepend(node)


def _reads_late(user: fx.Node) -> bool:
    return user.op != "output" and info(user).phase is Phase.BACKWARD

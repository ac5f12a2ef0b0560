"""A region of a program that runs in chunks: each chunk computes a slice of its rows, so that no value inside of it is
ever whole.

`sort` finds the kind of each node of a region, by the axis that is sliced:

    part    each chunk makes its slice of the rows           -> put together (cat), if anything outside reads it
    share   each chunk makes a term of a sum over the rows   -> added up, chunk by chunk
    late    reads a sum, or works on all rows               -> stays behind the chunks
    early   has no rows                                     -> stays before them

(A mean is a sum, and a division after it.) `build` writes the chunks one after another: a chunk's own values die with
it. The chunks of a backward recompute the forward's values that they read, from the inputs of the region, by copies.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from torch import fx

from zgraph.passes.analysis.axes import Axes, Axis
from zgraph.passes.analysis.slices import Slices, elements, rows_of, sliced
from zgraph.passes.spmd.sharding_rules import getitem_of
from zgraph.program.aliases import made_once
from zgraph.program.node import NodeInfo, Phase, info, set_info, tensor
from zgraph.program.program import Program


@dataclass
class Sorted:
    """The nodes of a region by their kind, in order."""

    axis: Axis  # the axis that is sliced
    # all nodes that run in chunks: parts, shares, and operators with several results
    nodes: dict[fx.Node, None] = field(default_factory=dict)
    parts: dict[fx.Node, None] = field(default_factory=dict)  # each chunk makes its slice of the rows
    shares: dict[fx.Node, None] = field(default_factory=dict)  # each chunk makes a term of a sum over the rows
    # nodes, of the region or not, that have to come after the chunks
    late: dict[fx.Node, None] = field(default_factory=dict)
    rows: set[fx.Node] = field(default_factory=set)  # those outside of chunks that depend on parts, not on sums alone


@dataclass(frozen=True)
class Obstacle:
    """A node with a large result that works on all rows: its result would be whole."""

    node: fx.Node  # the operator that needs all rows
    before: Sorted  # the nodes that were sorted before it


def sort(
    program: Program, axes: Axes, region: Collection[fx.Node], axis: Axis, bound: int, small: int
) -> Sorted | Obstacle:
    """Return the nodes of a region by kind.

    Nodes that can't be sliced stay before or after the chunks if they have no more than `bound` elements. Sums of
    values with no more than `small` elements stay before the chunks, which may need them.
    """
    region = set(region)
    while True:
        outcome = _sort(program, axes, region, axis, bound)
        early = _small_sums(outcome if isinstance(outcome, Sorted) else outcome.before, small)
        if not early:
            return outcome
        region -= early


def _small_sums(region: Sorted, small: int) -> set[fx.Node]:
    """Return the sums over rows of values with no more than `small` elements, with all nodes of the region that they
    are made of.
    """
    sums: set[fx.Node] = set()
    for share in region.shares:
        of, stack = {share}, [share]
        while stack:
            new = [o for o in stack.pop().all_input_nodes if o in region.nodes and o not in of]
            of.update(new)
            stack += new
        if all(elements(o) <= small for n in of for o in (n, *n.all_input_nodes)):
            sums |= of
    return sums


def _sort(program: Program, axes: Axes, region: Collection[fx.Node], axis: Axis, bound: int) -> Sorted | Obstacle:
    sorted_nodes = Sorted(axis)
    left = len(region)
    for node in program.graph.nodes:
        if not left:
            break
        if node.op != "call_function":
            continue
        left -= node in region
        behind = any(o in sorted_nodes.late or o in sorted_nodes.shares for o in node.all_input_nodes)
        reads = any(o in sorted_nodes.parts or o in sorted_nodes.rows for o in node.all_input_nodes)
        if node not in region:
            if behind or reads:
                sorted_nodes.late[node] = None
            if reads:
                sorted_nodes.rows.add(node)
            continue
        rows = rows_of(axes, node, axis) or any(rows_of(axes, o, axis) for o in node.all_input_nodes)
        source = node.args[0] if getitem_of(node) is not None else None
        if source in sorted_nodes.nodes and not behind:
            summed = not axes.shapes(node) or not rows_of(axes, node, axis)
            sorted_nodes.nodes[node] = (sorted_nodes.shares if summed else sorted_nodes.parts)[node] = None
            continue
        kinds = sliced(axes, node, axis) if rows and not behind else None
        if kinds is not None:
            if not all(kinds) and info(node).phase is Phase.FORWARD and elements(node) > bound:
                return Obstacle(node, sorted_nodes)  # (a backward's sums may be large: weights' gradients)
            sorted_nodes.nodes[node] = None
            if getattr(node.meta.get("val"), "shape", None) is not None:
                (sorted_nodes.parts if kinds[0] else sorted_nodes.shares)[node] = None
            continue
        if (reads or rows_of(axes, node, axis)) and elements(node) > bound:
            return Obstacle(_first_in_the_way(node, sorted_nodes, region), sorted_nodes)
        if behind or reads:
            sorted_nodes.late[node] = None
        if reads:
            sorted_nodes.rows.add(node)
    return sorted_nodes


def _first_in_the_way(node: fx.Node, sorted_nodes: Sorted, region: Collection[fx.Node]) -> fx.Node:
    """Return the operator that needs all rows, given a node that depends on it."""
    while True:
        before = next((o for o in node.all_input_nodes if o in sorted_nodes.late and o in region), None)
        if before is None:
            return node
        node = before


class Chunks(Slices):
    """The chunks of one region: of its forward, then of its backward, if it has one. The chunks of a phase are named
    "`name` forward 0" and so on, in `NodeInfo.chunk`.
    """

    def __init__(
        self, program: Program, axes: Axes, name: str, count: int, forward: Sorted, backward: Sorted | None
    ) -> None:
        super().__init__(program, axes, forward.axis, count)
        self.name, self.forward, self.backward = name, forward, backward
        self.taken = {**forward.nodes, **(backward.nodes if backward is not None else {})}
        # By chunk: the new node of each of the forward's nodes.
        self.made: list[dict[fx.Node, fx.Node]] = [{} for _ in range(count)]
        self.copies = 0

    def build(self) -> int:
        """Write all chunks and return how many nodes of the backward are copies of the forward's."""
        self._write(self.forward)
        if self.backward is not None:
            self._write(self.backward)
        for node in [
            *reversed(self.backward.nodes if self.backward is not None else {}),
            *reversed(self.forward.nodes),
        ]:
            self.program.graph.erase_node(node)
        return self.copies

    def _write(self, region: Sorted) -> None:
        """Write a phase's chunks after the last of its nodes."""
        graph = self.program.graph
        last = max(region.nodes)
        behind = last.next
        results = {*self.program.output_values()}
        read = [n for n in region.parts if n in results or any(u not in self.taken for u in n.users)]
        sums: dict[fx.Node, fx.Node] = {}
        parts: dict[fx.Node, list[fx.Node]] = {n: [] for n in read}
        with graph.inserting_before(behind):
            for chunk in range(self.count):
                new_nodes = self._build_chunk(region, chunk, sums)
                for node in read:
                    parts[node].append(new_nodes[node])
            finals = {n: self.joined(pieces, n, _made(n)) for n, pieces in parts.items()}
            finals |= {n: self.cast(total, tensor(n).dtype, _made(n)) for n, total in sums.items()}
        for node, final in finals.items():
            self.axes.alias(final, node)
            for user in list(node.users):
                if node in region.shares or user not in self.taken:
                    user.replace_input_with(node, final)
        for node in [n for n in graph.nodes if n in region.late and n < last]:
            behind.prepend(node)

    # -- one chunk -----------------------------------------------------------------------------------------------------
    def _build_chunk(self, region: Sorted, chunk: int, sums: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
        new_nodes = self.made[chunk] if region is self.forward else {}
        slices: dict[fx.Node, fx.Node] = {}  # by the node that is sliced
        copies: dict[fx.Node, fx.Node] = {}  # (these include the forward's slices of the same values)
        for node in region.nodes:
            record = _made(node).replace(chunk=f"{self.name} {info(node).phase} {chunk}")

            def now(operand: fx.Node, record: NodeInfo = record) -> fx.Node:
                if operand in new_nodes:
                    return new_nodes[operand]
                if operand in self.forward.nodes:
                    return self._again(self.made[chunk][operand], copies, str(record.chunk))
                if operand not in slices and rows_of(self.axes, operand, self.axis):
                    slices[operand] = self.slice(operand, chunk, record)
                return slices.get(operand, operand)

            if node in region.shares:
                sums[node] = self.total(node, chunk, now, record, sums.get(node))
            else:
                new_nodes[node] = self.one(node, chunk, now, record)
        return new_nodes

    def _again(self, node: fx.Node, copies: dict[fx.Node, fx.Node], chunk: str) -> fx.Node:
        """Return a copy, in the backward's chunk, of a value that the forward has made in its chunk."""
        if node.op != "call_function" or info(node).chunk is None or made_once(node):
            return node
        if node not in copies:
            for used in node.all_input_nodes:
                self._again(used, copies, chunk)
            copies[node] = self.program.repeat(node, copies, "tile")
            set_info(copies[node], info(copies[node]).replace(chunk=chunk))
            self.copies += 1
        return copies[node]


def _made(node: fx.Node) -> NodeInfo:
    return info(node).replace(made_by="tile", copy_of=None)

"""Replays a schedule of a chain in the graph: recomputed nodes become nodes of the backward."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable

from torch import fx

from zgraph.passes.remat.segments import Chain, Segment
from zgraph.passes.remat.solver import Again, Keep, Schedule
from zgraph.program import collectives
from zgraph.program.aliases import root_of
from zgraph.program.node import Phase, info
from zgraph.program.program import Program


class Replay:
    """The replay of a schedule in a program: it orders the backward's nodes, with copies of the forward's between them."""

    def __init__(self, program: Program, chain: Chain) -> None:
        self.program = program
        self.chain = chain
        self.here: dict[fx.Node, fx.Node] = {n: n for n in chain.pinned}  # by storage: the value that has it now
        self.copies = 0
        self.output = program.output_node()

    def run(self, schedule: Schedule) -> int:
        """Replay the schedule and return the number of copies."""
        for node in self.chain.loose:
            self._place(node, {})
        self._follow(schedule, first=True)
        self.program.graph.eliminate_dead_code()  # (forward nodes that only the backward read, which reads copies now)
        return self.copies

    def _follow(self, schedule: Schedule, first: bool) -> None:
        segments = self.chain.segments
        if isinstance(schedule, Again):
            if schedule.rest is not None:
                values = self._keep(segments[schedule.until].before, first)
                self._follow(schedule.rest, first)
                self._drop(values)
            self._follow(schedule.later, first=False)
            return
        segment = segments[schedule.segment]
        stays = segment.ways[schedule.way].kept if first or schedule.rest is not None else frozenset()
        behind = segment.behind - stays if schedule.rest is not None else frozenset()
        values = self._keep([*stays, *behind], first)
        if schedule.rest is not None:
            self._follow(schedule.rest, first)
            self._drop(behind.intersection(values))
            values = [value for value in values if value not in behind]
        self._backward(segment)
        self._drop(values)

    def _keep(self, values: Iterable[fx.Node], first: bool) -> list[fx.Node]:
        """Make these storages available: as the forward has made them, or recomputed. Return those that were not
        available before.
        """
        wanted = [v for v in dict.fromkeys(values) if v not in self.here]
        memo: dict[fx.Node, fx.Node] = {}
        for value in sorted(wanted):
            node = value if first else self._again(value, memo)
            memo[value] = node
        self.here.update({v: memo[v] for v in wanted})
        return wanted

    def _drop(self, values: Iterable[fx.Node]) -> None:
        for value in values:
            del self.here[value]

    def _backward(self, segment: Segment) -> None:
        memo: dict[fx.Node, fx.Node] = {}
        for node in segment.backward:
            self._place(node, memo)

    def _place(self, node: fx.Node, memo: dict[fx.Node, fx.Node]) -> None:
        """Put a backward node next, after copies of the forward's values that it reads and that are not available."""
        for used in node.all_input_nodes:
            if used.op == "call_function" and info(used).phase is Phase.FORWARD:
                now = self._again(used, memo)
                if now is not used:
                    node.replace_input_with(used, now)
        self.output.prepend(node)

    def _again(self, node: fx.Node, memo: dict[fx.Node, fx.Node]) -> fx.Node:
        """Return a forward node's value as it is available now: itself, or a copy after the nodes that are placed so
        far.
        """
        if node.op != "call_function" or info(node).phase is not Phase.FORWARD:
            return node
        root = root_of(node)
        # Views of inputs need no copy, and results of collectives are always saved.
        if root.op == "placeholder" or self.here.get(root) is root or collectives.is_wait(node):
            return node
        if node is root and node in self.here:
            return self.here[node]
        if node in memo:
            return memo[node]
        for used in node.all_input_nodes:
            self._again(used, memo)
        with self.program.graph.inserting_before(self.output):
            memo[node] = self.program.repeat(node, ChainMap(self.here, memo), "rematerialize")
        self.copies += 1
        return memo[node]


def depth_of(schedule: Schedule) -> int:
    """Return how often a segment is computed at most, besides in the forward."""
    if isinstance(schedule, Keep):
        return 0 if schedule.rest is None else depth_of(schedule.rest)
    rest = 0 if schedule.rest is None else depth_of(schedule.rest)
    return max(rest, 1 + depth_of(schedule.later))

"""What the overlap pass schedules: the operators in their order, and the transfers, with the makers and readers of what
they carry.
"""

from __future__ import annotations

import copy
import heapq
from dataclasses import dataclass, replace

from torch import fx

from zgraph.passes.analysis.costs import Costs
from zgraph.passes.analysis.live_memory import memory_of
from zgraph.passes.analysis.parameter_collectives import ParameterCollective, gathers_of, reductions_of
from zgraph.program import collectives
from zgraph.program.aliases import is_view
from zgraph.program.groups import ranks_in
from zgraph.program.node import Phase, info
from zgraph.program.program import Program


@dataclass(eq=False)
class Bucket:
    """Transfers that start together."""

    members: list[ParameterCollective]  # the transfers, in order
    seconds: float  # on the link
    work: float  # of the compute stream, to start them
    held: int  # bytes, from the start on
    counted: bool = True  # whether the cap on gathered bytes counts it; false for weights that outlive the program
    earliest: int = 0  # position of the first operator before which it may start (gathers)
    first: int = -1  # position of the first reader (gathers), of the source (reductions), among the operators
    started: bool = False  # whether the schedule has started it
    awaited: bool = False  # whether the schedule has waited for it
    done: float = 0.0  # when the link is done with it, in simulated time
    blocked: tuple[str, str] | None = None  # why it could not start earlier, and the setting that would let it


class SchedulingProblem:
    """A step's operators and transfers. The constructor puts views of gathered parameters before their first readers,
    and changes nothing else.
    """

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program, self.costs = program, costs
        gathers, reductions = gathers_of(program), reductions_of(program)
        moved = {n for t in (*gathers, *reductions) for n in t.nodes}
        _sink_views(gathers)
        self.operators = [n for n in program.graph.nodes if n.op not in ("placeholder", "output") and n not in moved]
        self.at = {n: i for i, n in enumerate(self.operators)}
        compute = costs.compute(program)
        self.cost = [compute.get(n, 0.0) for n in self.operators]
        self.before = [0.0]  # the time at which each operator would start without communication
        for seconds in self.cost:
            self.before.append(self.before[-1] + seconds)
        self.last: dict[ParameterCollective, int] = {}  # the position of the last reader of each gather
        self.gathers = self._gathers(gathers)
        self.reductions = [self._bucket(b) for b in _buckets(reductions)]
        ends = {t.last for t in reductions}
        self.chained: dict[fx.Node, Bucket] = {  # by the end of the first reduction, which a second one starts from
            m.source: b for b in self.reductions for m in b.members if m.source in ends and m.source is not None
        }
        self.made = self._made(ends)
        self.others = self._others()

    def _others(self) -> list[int]:
        """Return the bytes that are live at each operator, without gathered parameters."""
        memory = dict(zip(self.program.graph.nodes, memory_of(self.program, self.costs.fused), strict=True))
        return [sum(memory[n].values()) - memory[n].get("gathered", 0) for n in self.operators]

    def over(self, speed: float) -> SchedulingProblem:
        """Return the same step, not scheduled yet, over links that are `speed` times as fast."""
        problem = copy.copy(self)
        buckets = {b: replace(b, seconds=b.seconds / speed) for b in (*self.gathers, *self.reductions)}
        problem.gathers = [buckets[b] for b in self.gathers]
        problem.reductions = [buckets[b] for b in self.reductions]
        problem.chained = {wait: buckets[b] for wait, b in self.chained.items()}
        return problem

    def _bucket(self, members: list[ParameterCollective]) -> Bucket:
        starts = [m.start for m in members]
        ranks = ranks_in(collectives.group_of(starts[0]), self.program.mesh)
        seconds, work = self.costs.transfer(starts, ranks), self.costs.work(starts)
        return Bucket(members, seconds, work, sum(m.bytes for m in members))

    def _gathers(self, gathers: list[ParameterCollective]) -> list[Bucket]:
        """Return the buckets of gathers in the order of their first readers."""
        results = {n for _, n in self.program.output_items()}
        count = len(self.operators)
        buckets = [self._bucket(b) for b in _buckets(gathers)]
        for bucket in buckets:
            ends = []
            sources = [self.at[m.source] for m in bucket.members if m.source in self.at]
            bucket.earliest = max(sources, default=-1) + 1
            for member in bucket.members:
                readers = [r for r in member.readers() if r in self.at]
                leaves = any(alias in results for alias in _all_views(member.last)) or member.last in results
                self.last[member] = count if leaves else max((self.at[r] for r in readers), default=0)
                ends.append(leaves)
                aliases = [n for n in _all_views(member.last) if n in self.at]
                first = min((self.at[n] for n in [*readers, *aliases]), default=count if leaves else 0)
                bucket.first = first if bucket.first < 0 else min(bucket.first, first)
            bucket.counted = not all(ends)
        return sorted(buckets, key=lambda b: b.first)

    def _made(self, ends: set[fx.Node]) -> dict[int, int]:
        """Return the bytes of gradients to scatter, by the position at which they are computed.

        (A reduction belongs to the backward, also of a gradient that the forward has made or that comes into the
        backward.)
        """
        arrives = {n: b.first for b in self.gathers for m in b.members for n in m.nodes}
        last_forward = max((i for i, n in enumerate(self.operators) if info(n).phase is Phase.FORWARD), default=-1)
        bytes_at: dict[int, int] = {}
        for bucket in self.reductions:
            for member in bucket.members:
                source = member.source
                known = source is not None and source not in ends
                position = max(last_forward, self.at.get(source, arrives.get(source, -1))) if known else last_forward  # type: ignore[arg-type]
                bucket.first = max(bucket.first, position)
                bytes_at[position] = bytes_at.get(position, 0) + member.bytes
        return bytes_at

    def needed(self) -> tuple[int, list[Bucket]]:
        """Return the gathered bytes that the program needs at once if each bucket starts where it is needed, and these
        buckets.
        """
        counted = sorted((b for b in self.gathers if b.counted), key=lambda b: b.first)
        alive: list[tuple[int, int]] = []  # (the last reader, the bytes) of what is gathered, as a heap
        worst = total = begun = 0
        where = -1
        for at in sorted({b.first for b in counted}):
            while begun < len(counted) and counted[begun].first <= at:
                for member in counted[begun].members:
                    heapq.heappush(alive, (self.last[member], member.bytes))
                    total += member.bytes
                begun += 1
            while alive and alive[0][0] < at:
                total -= heapq.heappop(alive)[1]
            if total > worst:
                worst, where = total, at
        return worst, [b for b in counted if b.first <= where and max(self.last[m] for m in b.members) >= where]


def _sink_views(gathers: list[ParameterCollective]) -> None:
    """Move views of a gathered parameter before their first reader: a view is no reason to gather."""
    for gather in gathers:
        for view in reversed([n for n in _all_views(gather.last) if n not in gather.nodes]):
            users = [u for u in view.users if u.op != "output"]
            if users and info(min(users)).phase is info(view).phase:
                min(users).prepend(view)


def _buckets(transfers: list[ParameterCollective]) -> list[list[ParameterCollective]]:
    """Return transfers by bucket; one without a bucket is by itself."""
    by_bucket: dict[object, list[ParameterCollective]] = {}
    for transfer in transfers:
        by_bucket.setdefault(info(transfer.start).bucket or transfer, []).append(transfer)
    return list(by_bucket.values())


def _all_views(node: fx.Node) -> list[fx.Node]:
    """Return the views of a value, and their views, in graph order, without the value itself."""
    views: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if is_view(user) and user not in views:
                views[user] = None
                stack.append(user)
    return sorted(views)

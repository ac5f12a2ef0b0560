"""Puts gradients of the first layers' weights behind the last large gradient, whose reduction then has them to run
beside.

*Contract.* On entry every gradient is reduced as soon as it is computed. On exit matrix products that only make the
gradients of weights, and the reductions of these, may come later, behind the start of the reduction of the gradient
that is known last; all else keeps its order, and what is computed stays the same, bit for bit.

A backward ends with the model's first parameters, often with a table that is larger than any layer: the whole step
would wait for its reduction. Only the gradients of activations lead there; those of weights nobody waits for. (Putting
them later is the idea of zero-bubble pipelines: Qi et al., "Zero Bubble Pipeline Parallelism", 2023.) How many are put
there is what ends the step soonest by a simulation of computing and link, for links of several speeds: see
`zgraph/passes/overlap/robust_schedule.py`. What they hold longer never raises the step's peak.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from torch import fx

from zgraph.passes.analysis.costs import CPU, Costs, size_of
from zgraph.passes.analysis.live_memory import memory_of
from zgraph.passes.analysis.parameter_collectives import ParameterCollective, gathers_of, reductions_of
from zgraph.passes.analysis.slices import PRODUCTS
from zgraph.passes.contract import graph_pass
from zgraph.passes.overlap.follow_order import Start
from zgraph.passes.overlap.robust_schedule import SPEEDS, least_regret_of
from zgraph.program import collectives
from zgraph.program.aliases import is_view, is_write, made_once, root_of
from zgraph.program.groups import ranks_in
from zgraph.program.node import Phase, Role, has_info, info
from zgraph.program.program import Fact, Program

MOST = 64  # gradients that are put later


@dataclass(frozen=True)
class DeferOptions:
    """Options of `defer_gradients`."""

    costs: Costs = field(default_factory=lambda: Costs(CPU))  # of operators and links
    order: tuple[Start, ...] = ()  # another program's order: what is put later there is put later here


@dataclass(eq=False)
class _Gradient:
    """A gradient that may be computed later."""

    nodes: list[fx.Node]  # what only computes it, in order
    transfers: list[ParameterCollective]  # its reductions, one after another
    seconds: float  # of its computing
    held: int  # bytes that these nodes read and nothing reads after them


@graph_pass(
    "defer_gradients",
    "weights' gradients that nothing waits for are computed beside the last large reduction",
    options=DeferOptions,
    requires=(Fact.SHARDED, Fact.REDUCED),
    conflicts=(Fact.BUCKETED, Fact.SCHEDULED),
)
def defer_gradients(program: Program, options: DeferOptions) -> dict[str, int]:
    tail = _Tail(program, options.costs)
    deferred = tail.as_in(options.order) if options.order else tail.candidates[: tail.best()]
    tail.move(deferred)
    return {"deferred": len(deferred)}


class _Tail:
    """The end of a backward: the reduction that is known `last`, and the gradients before it that may come after it, the
    latest first.
    """

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program, self.costs = program, costs
        self.at = {node: number for number, node in enumerate(program.graph.nodes)}
        self.cost = costs.compute(program)
        self.written = {root_of(node.all_input_nodes[0]) for node in self.at if is_write(node)}
        chains = _chains(reductions_of(program))
        known = {c[0]: self.at[c[0].source] for c in chains if c[0].source is not None}
        self.chains = sorted((c for c in chains if c[0] in known), key=lambda c: known[c[0]])
        self.last: list[ParameterCollective] = self.chains[-1] if self.chains else []
        clock = list(accumulate(self.cost.get(node, 0.0) for node in self.at))
        self.computing = clock[-1]
        # what the link carries in the backward, as (position, when it may start, seconds): gathers a little early
        self.transfers: dict[ParameterCollective, tuple[int, float, float]] = {}
        for chain in self.chains:
            seconds = sum(map(self._seconds, chain))
            self.transfers[chain[0]] = known[chain[0]], clock[known[chain[0]]], seconds
        for gather in gathers_of(program):
            if info(gather.start).phase is Phase.BACKWARD:
                reader, seconds = min(gather.readers(), default=gather.last), self._seconds(gather)
                self.transfers[gather] = self.at[reader], clock[self.at[reader]] - 2 * seconds, seconds
        self.candidates: list[_Gradient] = []
        first = max((self.at[n] for n in self.at if _stays(n)), default=-1)
        for chain in reversed(self.chains[:-1]):
            if len(self.candidates) < MOST and known[chain[0]] > first:
                self.candidates += self._deferrable(chain)

    def _deferrable(self, chain: list[ParameterCollective]) -> list[_Gradient]:
        """Return the gradient of these reductions, if matrix products alone make it that make nothing else."""
        source = chain[0].source
        inside = {n for t in chain for n in t.nodes}
        mine: list[fx.Node] = []
        # (Only views of what products read: their other operands are made in kernels that make more besides.)
        stack = [(source, False)] if source is not None else []
        while stack:
            node, is_operand = stack.pop()
            if node in inside or not _can_move(node) or not all(user in inside for user in node.users):
                continue
            if is_operand and not is_view(node):
                continue
            inside.add(node)
            mine.append(node)
            stack += [(operand, is_operand or node.target in PRODUCTS) for operand in node.all_input_nodes]
        if not any(node.target in PRODUCTS for node in mine):
            return []
        mine.sort(key=self.at.__getitem__)
        last = self.at[mine[-1]]
        read = {root_of(n) for node in mine for n in node.all_input_nodes if n not in inside}
        if read & self.written:
            return []
        held = sum(size_of(n) for n in read if n.op != "placeholder" and all(self.at[u] <= last for u in n.users))
        return [_Gradient(mine, chain, sum(self.cost.get(n, 0.0) for n in mine), held)]

    def as_in(self, order: Sequence[Start]) -> list[_Gradient]:
        """Return the candidates that come later in another program's order."""
        if not self.last:
            return []
        group = collectives.group_of(self.last[0].start)  # (over another group a gradient is reduced once more, later)
        names = [name for start in order if start.reduces and start.group == group for name in start.names]
        behind = names[names.index(self.last[0].name) + 1 :] if self.last[0].name in names else []
        return [gradient for gradient in self.candidates if gradient.transfers[0].name in behind]

    def best(self) -> int:
        """Return how many of the candidates end the step soonest, or so that costs that are wrong lose least, without
        raising the step's peak.
        """
        count = self._soonest(len(self.candidates))
        return self._soonest(self._most_in_memory()) if count else 0

    def _soonest(self, most: int) -> int:
        """Return how many of the first `most` candidates to take."""
        return least_regret_of([[self._end(number, speed) for speed in SPEEDS] for number in range(most + 1)])[0]

    def _most_in_memory(self) -> int:
        """Return how many of the candidates may come later without raising the step's peak."""
        live = [sum(categories.values()) for categories in memory_of(self.program, self.costs.fused)]
        peak, count, held = max(live), 0, 0
        after = list(accumulate(reversed(live), max))[::-1]  # the most from each position on
        for gradient in self.candidates:
            held += gradient.held
            if after[self.at[gradient.nodes[0]]] + held > peak:
                break
            count += 1
        return count

    def _end(self, count: int, speed: float) -> float:
        """Return when the last reduction is done, if so many candidates come later, over a link of this speed."""
        deferred = self.candidates[:count][::-1]
        places = [self.at[g.nodes[-1]] for g in deferred]
        sooner = [0.0, *accumulate(g.seconds for g in deferred)]  # what comes before a position no more
        clock = self.computing - sooner[-1]
        later = {gradient.transfers[0] for gradient in deferred}
        jobs = []
        for transfer, (position, begins, seconds) in self.transfers.items():
            if transfer not in later:
                jobs.append((begins - sooner[bisect_left(places, position)], seconds))
        for gradient in deferred:
            clock += gradient.seconds
            jobs.append((clock, self.transfers[gradient.transfers[0]][2]))
        done = 0.0
        for begins, seconds in sorted(jobs):
            done = max(done, begins) + seconds / speed
        return max(done, clock)

    def _seconds(self, transfer: ParameterCollective) -> float:
        """Return the seconds of a transfer on the link."""
        ranks = ranks_in(collectives.group_of(transfer.start), self.program.mesh)
        return self.costs.transfer([transfer.start], ranks)

    def move(self, deferred: list[_Gradient]) -> None:
        """Put these gradients and their reductions behind the last reduction, in the order that they had."""
        if not deferred:
            return
        cursor = max(n for t in self.last for n in t.nodes)
        for gradient in sorted(deferred, key=lambda g: self.at[g.nodes[-1]]):
            for node in (*gradient.nodes, *(n for t in gradient.transfers for n in t.nodes)):
                cursor.append(node)
                cursor = node


def _chains(reductions: list[ParameterCollective]) -> list[list[ParameterCollective]]:
    """Return the reductions of each gradient: over a second mesh dimension after the first."""
    chains: dict[fx.Node, list[ParameterCollective]] = {}
    for reduction in reductions:
        chain = chains.pop(reduction.source, []) if reduction.source is not None else []
        chains[reduction.last] = [*chain, reduction]
    return list(chains.values())


def _can_move(node: fx.Node) -> bool:
    """Return whether a node of the backward may be computed later."""
    return (
        node.op == "call_function"
        and has_info(node)
        and info(node).phase is Phase.BACKWARD
        and info(node).role is Role.COMPUTE
        and not made_once(node)
        and not is_write(node)
    )


def _stays(node: fx.Node) -> bool:
    """Return whether gradients may not be moved from before this node to behind it: ranks exchange parts of layers here,
    and compute beside it.
    """
    return has_info(node) and info(node).role is Role.EXCHANGE

"""The forward as a chain of segments, and the cost of saving, dropping and recomputing their values.

A captured program is cut where few bytes cross from computed nodes to later ones: between the layers of most models,
whatever they are called. Backward nodes belong to the segment whose values they read. For each segment there are
*ways*: sets of its values that a forward may save for its backward, from all of them to none, each with its bytes and
with the time to recompute the rest.

The values that cross a cut are saved together or not at all. Values that cross much of the program (masks, rotary
tables, long skips), that leave it, and that were drawn at random are *pinned*: the forward computes them once and they
stay.

Segments with ways are those of Rockmate (Zhao et al., 2023, "Rockmate: an Efficient, Fast, Automatic and Generic Tool
for Re-materialization in PyTorch"); here they are found by bytes, and no module or block has to be named.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from zgraph.passes.analysis.costs import Costs, most_bytes, own_bytes, signature
from zgraph.passes.analysis.fusion import pointwise, sources
from zgraph.program import collectives
from zgraph.program.aliases import made_once, root_of
from zgraph.program.node import Phase, info, value
from zgraph.program.program import InputRole, OutputRole, Program

FLAT = 1.1  # crossings within this factor are equal
LONG = 0.25  # a value that is read after this share of the forward is pinned
MOST = 96  # segments
SHARED = 0.5  # the largest share of the bytes at a cut that may cross the next cut as well
MIN_SHARE = 0.002  # of all bytes of the forward, before the first cut and after the last one at least
WAYS = 10  # of a segment


@dataclass(frozen=True)
class SegmentOption:
    """A set of a segment's values that stay from its forward to its backward, and what it costs."""

    kept: frozenset[fx.Node]  # the storages that stay
    bytes: int  # of the kept values that do not cross the cut after the segment
    shared: int  # bytes of the kept values that cross it
    seconds: float  # to recompute the other values
    forward: int  # bytes that are live at most while the forward runs, without what crosses the cut before the segment
    backward: int  # the same for the backward
    whole: int  # the same for the backward with what crosses the cut before the segment, as long as it is read
    alone: bool  # whether the backward does not read what crosses the cut before the segment


@dataclass(eq=False)
class Segment:
    """Nodes of the forward between two cuts, and the nodes of the backward that belong to them."""

    nodes: list[fx.Node]  # the forward's nodes, in order
    backward: list[fx.Node]  # the backward's nodes, in order
    before: frozenset[fx.Node] = frozenset()  # the storages that cross the cut before it
    behind: frozenset[fx.Node] = frozenset()  # the storages that cross the cut after it
    needs: frozenset[fx.Node] = frozenset()  # its own storages that its backward reads
    seconds: float = 0.0  # its forward takes
    backward_seconds: float = 0.0  # its backward takes
    gradients: int = 0  # bytes of the parameters' gradients that its backward makes
    tangents: int = 0  # bytes of values of later segments' backwards that are live when its backward begins
    dying: frozenset[fx.Node] = frozenset()  # the storages of these that no earlier segment's backward reads
    ways: list[SegmentOption] = field(default_factory=list)  # ordered by bytes: the first keeps nothing, the last all

    @property
    def input_bytes(self) -> int:
        return sum(map(most_bytes, self.before))

    @property
    def output_bytes(self) -> int:
        return sum(map(most_bytes, self.behind))


@dataclass(eq=False)
class Chain:
    """A program's segments and pinned values."""

    segments: list[Segment]  # in order
    pinned: frozenset[fx.Node]  # the storages that stay from the forward on
    loose: list[fx.Node]  # backward nodes that belong to no segment; they run before all others

    def on(self, program: Program) -> Chain:
        """Return this chain on a copy of its program, whose nodes have the same names."""
        named = {n.name: n for n in program.graph.nodes}

        def each(nodes: Iterable[fx.Node]) -> list[fx.Node]:
            return [named[n.name] for n in nodes]

        def there(segment: Segment) -> Segment:
            return replace(
                segment,
                nodes=each(segment.nodes),
                backward=each(segment.backward),
                before=frozenset(each(segment.before)),
                behind=frozenset(each(segment.behind)),
                needs=frozenset(each(segment.needs)),
                dying=frozenset(each(segment.dying)),
                ways=[replace(way, kept=frozenset(each(way.kept))) for way in segment.ways],
            )

        return Chain([there(s) for s in self.segments], frozenset(each(self.pinned)), each(self.loose))


def chain_of(program: Program, costs: Costs, apart: float = 2.0) -> Chain:
    """Cut a captured program into its chain. Between two cuts at least `apart` times as many bytes are made as cross
    them.
    """
    return _Builder(program, costs, apart).build()


class _Builder:
    def __init__(self, program: Program, costs: Costs, apart: float) -> None:
        self.program = program
        self.apart = apart
        self.seconds = costs.compute(program)
        self.fused = costs.fused
        nodes = list(program.graph.nodes)
        self.on = sources(nodes, fused=False)
        # Values that take no memory where they are neither saved nor cross a cut: kernels of their readers compute them.
        inside = sources(nodes, fused=costs.fused)
        self.inlined = {n for n in nodes if self.on[n] == (n,) != inside[n]}
        calls = [n for n in program.graph.nodes if n.op == "call_function"]
        self.forward = [n for n in calls if info(n).phase is Phase.FORWARD]
        self.later = [n for n in calls if info(n).phase is not Phase.FORWARD]
        self.at = {n: i for i, n in enumerate(self.forward)}
        self.last: dict[fx.Node, int] = {}  # position of the last forward reader of a storage
        for i, node in enumerate(self.forward):
            for root in (*self.on[node], *self.storages(node)):
                if root in self.at and isinstance(
                    value(root), torch.Tensor
                ):  # (each result of a tuple is a value by itself)
                    self.last[root] = i
        self.results = {root_of(n) for p, n in program.output_items() if p.role is not OutputRole.GRADIENT}
        gradients = {p.name: root_of(n) for p, n in program.output_items() if p.role is OutputRole.GRADIENT}
        self.gradient_outputs = set(gradients.values())
        self.parts = {  # over how many ranks each gradient will be sharded
            gradients[name]: program.mesh[str(spec.shard_dim)]
            for name, spec in program.params.items()
            if name in gradients and spec.shard_dim is not None
        }
        reach = LONG * len(self.forward)
        self.pinned = {
            n for n, last in self.last.items() if n in self.results or made_once(n) or last - self.at[n] > reach
        }

    def storages(self, node: fx.Node) -> list[fx.Node]:
        """Return the storages that a node reads."""
        return [s for used in node.all_input_nodes for s in self.on[used]]

    def build(self) -> Chain:
        cuts = _few(self._unshared(self._cuts()), self.crossing)
        bounds = [0, *cuts, len(self.forward)]
        place = {}  # the segment of each forward node
        for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
            place.update(dict.fromkeys(self.forward[begin:end], number))
        parts, loose = self._backward_parts(place, len(bounds) - 1)
        segments = []
        for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
            segments.append(
                Segment(self.forward[begin:end], parts[number], self._crossing_at(begin), self._crossing_at(end))
            )
        for number, segment in enumerate(segments):
            read = {r for n in segment.backward for r in self.storages(n) if r in self.at}
            read -= self.pinned | segment.before
            self.pinned |= {
                r for r in read if place[r] != number
            }  # (the backward of another segment than its own reads it)
            segment.needs = frozenset(r for r in read if place[r] == number)
        self._backward_crossings(segments)
        known: dict[str, list[tuple[frozenset[int], SegmentOption]]] = {}
        for segment in segments:
            segment.before -= self.pinned
            segment.behind -= self.pinned
            segment.seconds = sum(self.seconds.get(n, 0.0) for n in segment.nodes)
            segment.backward_seconds = sum(self.seconds.get(n, 0.0) for n in segment.backward)
            gradient_roots = {root_of(n) for n in segment.backward if root_of(n) in self.gradient_outputs}
            segment.gradients = sum(most_bytes(n) // self.parts.get(n, 1) for n in gradient_roots)
            segment.ways = self._ways(segment, known)
        return Chain(segments, frozenset(self.pinned), loose)

    # -- cuts -----------------------------------------------------------------------------------------------------------
    def _cuts(self) -> list[int]:
        """Return the positions before which the forward may be cut: where no more bytes cross than at any position
        near.
        """
        change = [0] * (len(self.forward) + 2)
        made_bytes = [0] * (len(self.forward) + 1)  # bytes made before each position
        for node, last in self.last.items():
            born = self.at[node.all_input_nodes[0] if node.target is operator.getitem else node]
            made_bytes[born + 1] += own_bytes(node) if node not in self.inlined else 0
            if node not in self.pinned:
                change[born + 1] += own_bytes(node)
                change[last + 1] -= own_bytes(node)
        self.crossing, live = [], 0
        for position in range(len(self.forward) + 1):
            live += change[position]
            self.crossing.append(live)
            made_bytes[position] += made_bytes[position - 1] if position else 0
        ends = MIN_SHARE * made_bytes[-1]
        first, last = bisect.bisect_right(made_bytes, ends), bisect.bisect_left(made_bytes, made_bytes[-1] - ends)
        cuts: list[int] = []
        for position in range(first, last):
            crossing = self.crossing[position]
            reach = self.apart * max(crossing, 1)
            low = max(first, bisect.bisect_left(made_bytes, made_bytes[position] - reach))
            high = min(last, bisect.bisect_right(made_bytes, made_bytes[position] + reach))
            far = not cuts or made_bytes[position] - made_bytes[cuts[-1]] >= reach
            if far and crossing <= FLAT * min(self.crossing[low:high]) and not self._inside(position):
                cuts.append(position)
        return cuts

    def _unshared(self, cuts: list[int]) -> list[int]:
        """Drop each cut that is crossed by mostly the same values as a neighbour with fewer bytes: they would count at
        both.
        """
        distinct_cuts: list[int] = []
        for cut in cuts:
            while distinct_cuts and self._shared(distinct_cuts[-1], cut) > SHARED * min(
                self.crossing[distinct_cuts[-1]], self.crossing[cut]
            ):
                if self.crossing[distinct_cuts[-1]] <= self.crossing[cut]:
                    break
                distinct_cuts.pop()
            else:
                distinct_cuts.append(cut)
        return distinct_cuts

    def _shared(self, first: int, second: int) -> int:
        return sum(map(most_bytes, self._crossing_at(first) & self._crossing_at(second)))

    def _inside(self, position: int) -> bool:
        """Return whether a cut here would separate an operator with several results from them."""
        return position < len(self.forward) and self.forward[position].target is operator.getitem

    def _crossing_at(self, position: int) -> frozenset[fx.Node]:
        if position in (0, len(self.forward)):
            return frozenset()
        return frozenset(n for n, last in self.last.items() if self.at[n] < position <= last and n not in self.pinned)

    # -- the backward ----------------------------------------------------------------------------------------------------
    def _backward_parts(self, place: dict[fx.Node, int], count: int) -> tuple[list[list[fx.Node]], list[fx.Node]]:
        """Return the backward's nodes by segment, and those that belong to none.

        One that reads a value of the forward belongs to the segment of that value's last forward reader, or to the
        first of its operands' segments if that comes before. Any other belongs to the segment of its first reader.
        """
        # the backward's inputs, which any segment may read
        given = (InputRole.TANGENT, InputRole.RETURNED, InputRole.SCALE)
        free = {node for port, node in self.program.input_items() if port.role in given}
        most: dict[fx.Node, int] = dict.fromkeys(free, count - 1)
        tangents = set(free)
        fixed: set[fx.Node] = set()
        for node in self.later:
            read = [
                place[self.forward[self.last[r]]]
                for r in self.storages(node)
                if r in self.last and r not in self.pinned
            ]
            used = [most[a] for a in node.all_input_nodes if a in most]
            if used or read:
                most[node] = min(used + read)
            depends = any(a in tangents for a in node.all_input_nodes)
            copies = any(a in most and a not in tangents for a in node.all_input_nodes)
            if depends:
                tangents.add(node)
                if read or copies:
                    fixed.add(node)
        number: dict[fx.Node, int] = {}
        for node in reversed(self.later):
            users = [number[u] for u in node.users if u in number]
            if users and node not in fixed:
                number[node] = max(users)
            elif node in most:
                number[node] = most[node]
        parts: list[list[fx.Node]] = [[] for _ in range(count)]
        loose = []
        for node in self.later:
            if node in number:
                parts[number[node]].append(node)
            else:
                loose.append(node)
        return parts, loose

    def _backward_crossings(self, segments: Sequence[Segment]) -> None:
        """Set the segments' `tangents` and `dying`."""
        owner = {root_of(n): i for i, s in enumerate(segments) for n in s.backward}
        until: dict[fx.Node, int] = {}
        for i, segment in enumerate(segments):
            for node in segment.backward:
                for used in self.storages(node):
                    if used in owner and used not in self.gradient_outputs:
                        until[used] = min(until.get(used, i), i)
        for root, first in until.items():
            for segment in segments[first : owner[root]]:
                segment.tangents += most_bytes(root)
            if first < owner[root]:
                segments[first].dying |= {root}

    # -- ways -----------------------------------------------------------------------------------------------------------
    def _ways(
        self, segment: Segment, known: dict[str, list[tuple[frozenset[int], SegmentOption]]]
    ) -> list[SegmentOption]:
        """Return the ways of a segment, found once for segments of equal nodes."""
        index = {n: i for i, n in enumerate(segment.nodes)}
        key = self._signature(segment, index)
        if key not in known:
            ways = _Ways(segment, self).found()
            known[key] = [(frozenset(index[n] for n in way.kept), way) for way in ways]
        return [replace(way, kept=frozenset(segment.nodes[i] for i in indices)) for indices, way in known[key]]

    def _signature(self, segment: Segment, index: dict[fx.Node, int]) -> str:
        local = dict(index)
        local.update({n: len(local) + i for i, n in enumerate([*segment.backward, *sorted(segment.dying)])})

        def shown(node: fx.Node) -> str:
            return f"{signature(node)} {most_bytes(node)} {[local.get(a, -1) for a in node.all_input_nodes]}"

        needs = sorted(index[n] for n in segment.needs)
        out = sorted(index.get(n, -1) for n in segment.behind)
        return "\n".join(
            [*map(shown, segment.nodes), "", *map(shown, segment.backward), f"{needs} {out} {segment.tangents}"]
        )


class _Ways:
    """A search for a segment's ways, from all values that its backward needs: the value that saves most bytes per
    second is dropped next.

    A value whose recomputation alone makes the backward read the segment's input saves only the bytes beyond those of
    the input.
    """

    def __init__(self, segment: Segment, builder: _Builder) -> None:
        self.segment = segment
        self.seconds = builder.seconds
        self.gradients = builder.gradient_outputs
        self.given = builder.pinned
        self.on = builder.on
        self.storages = builder.storages
        self.fused = builder.fused
        self.inlined = builder.inlined

    def found(self) -> list[SegmentOption]:
        storages = set(self.segment.needs)
        ways = [self._way(frozenset(storages))]
        while storages:
            now = ways[-1]
            options = []
            for one in storages:
                seconds, alone = self._again(backward_order(self.segment, self.given.union(storages - {one})))
                saved = most_bytes(one) - self.segment.input_bytes * (now.alone and not alone)
                options.append(((seconds - now.seconds) / max(saved, 1), -saved, one.name, one))
            storages.remove(min(options)[3])
            ways.append(self._way(frozenset(storages)))
        ways.reverse()
        return _thinned(ways)

    def _again(self, order: list[fx.Node]) -> tuple[float, bool]:
        """Return the seconds of what a backward of this order recomputes, and whether it does not read the segment's
        input.
        """
        again = set(order)
        seconds = sum(self.seconds.get(n, 0.0) for n in self.segment.nodes if n in again)
        return seconds, self.segment.before.isdisjoint(r for n in order for r in self.storages(n))

    def _way(self, kept: frozenset[fx.Node]) -> SegmentOption:
        segment = self.segment
        shared = sum(map(most_bytes, kept & segment.behind))
        saved_bytes = sum(map(most_bytes, kept)) - shared
        order = backward_order(segment, kept | self.given)
        seconds, alone = self._again(order)
        besides = self._backward_peak(order, kept, there=True)
        whole = besides if alone else self._backward_peak(order, kept, there=False)
        return SegmentOption(kept, saved_bytes, shared, seconds, self._forward_peak(kept), besides, whole, alone)

    def _forward_peak(self, kept: frozenset[fx.Node]) -> int:
        stays = kept | self.segment.behind
        return self._peak(self.segment.nodes, set(), stays, self.given, 0)

    def _backward_peak(self, order: list[fx.Node], kept: frozenset[fx.Node], there: bool) -> int:
        """Return the most bytes at once in the backward, with the segment's input `there` all the time (and not
        counted), or until it is read.
        """
        segment = self.segment
        passing = segment.tangents - sum(map(most_bytes, segment.dying))
        live, given = kept | segment.dying, frozenset(self.given)
        live, given = (live, given | segment.before) if there else (live | segment.before, given)
        return self._peak(order, live, self.gradients, given, passing)

    def _peak(
        self,
        order: list[fx.Node],
        live: Collection[fx.Node],
        stays: Iterable[fx.Node],
        given: Iterable[fx.Node],
        base: int,
    ) -> int:
        """Return the most bytes at once.

        They are `base`, the storages `live` at first, and those that are made, each until its last reader or, if it
        `stays`, to the end. Storages in `given` count nothing.
        """
        given, stays, fixed = set(given), set(stays), set(live) - self.segment.dying
        last: dict[fx.Node, int] = {}
        on: dict[fx.Node, tuple[fx.Node, ...]] = {}
        for i, node in enumerate(order):
            read = [s for a in node.all_input_nodes for s in on.get(a, self.on[a])]
            if node in self.inlined and node not in stays and node not in live:
                on[node] = tuple(dict.fromkeys(read))
            else:
                on[node] = self.on[node] if self.on[node] == (node,) else tuple(dict.fromkeys(read))
            for used in (*read, *on[node]):
                last[used] = i
        live_storages = {n for n in live if n not in given}
        now = base + sum(map(most_bytes, live_storages))
        most = now
        ends: dict[int, list[fx.Node]] = {}
        for root, i in last.items():
            ends.setdefault(i, []).append(root)
        for i, node in enumerate(order):
            if on[node] == (node,) and node not in live_storages and node not in given:
                live_storages.add(node)  # (the bytes of several results come with their operator)
                now += 0 if node.target is operator.getitem else most_bytes(node)
            dying = [root for root in ends.get(i, []) if root in live_storages and root not in stays]
            in_place = (
                self.fused
                and pointwise(node)
                and any(most_bytes(r) == most_bytes(node) for r in dying if r not in fixed)
            )
            most = max(most, now - (most_bytes(node) if in_place else 0))  # (its result may overwrite an operand)
            for root in dying:
                live_storages.discard(root)
                now -= own_bytes(root)
        return most


def backward_order(segment: Segment, available: Collection[fx.Node]) -> list[fx.Node]:
    """Return the order in which a segment's backward runs if only the `available` ones of its storages exist.

    It has the backward's nodes and the forward's recomputed ones, each just before its first reader.
    """
    own = set(segment.nodes)
    recomputed: set[fx.Node] = set()
    order: list[fx.Node] = []

    def make(node: fx.Node) -> None:
        if node in recomputed or node not in own or (root_of(node) is node and node in available):
            return
        if collectives.is_wait(node):  # (results of collectives are always saved)
            return
        for used in node.all_input_nodes:
            make(used)
        recomputed.add(node)
        order.append(node)

    for node in segment.backward:
        for used in node.all_input_nodes:
            make(used)
        order.append(node)
    return order


def _thinned(ways: list[SegmentOption]) -> list[SegmentOption]:
    """Return at most `WAYS` ways, with the first and the last, without those that another way beats in bytes and in
    seconds.
    """
    best: list[SegmentOption] = []
    for way in ways:
        while best and best[-1].seconds <= way.seconds and len(best) > 1:
            best.pop()
        best.append(way)
    if len(best) <= WAYS:
        return best
    span = best[-1].bytes - best[0].bytes
    chosen = {0, len(best) - 1}
    for i in range(1, WAYS - 1):
        wanted = best[0].bytes + span * i / (WAYS - 1)
        chosen.add(min(range(len(best)), key=lambda at: abs(best[at].bytes - wanted)))
    return [best[i] for i in sorted(chosen)]


def _few(cuts: list[int], crossing: Sequence[int]) -> list[int]:
    """Return at most `MOST` - 1 of the cuts, evenly spread."""
    if len(cuts) < MOST:
        return cuts
    step = len(cuts) / (MOST - 1)
    groups = [cuts[int(i * step) : max(int((i + 1) * step), int(i * step) + 1)] for i in range(MOST - 1)]
    return [min(group, key=lambda p: (crossing[p], p)) for group in groups if group]

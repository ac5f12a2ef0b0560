"""The forward as a chain of segments, and what keeping, dropping and recomputing their values costs.

A captured program is cut where little crosses from what was computed to what will be: between the layers of most models,
whatever they are called. Backward nodes belong to the segment whose values they read. For each segment there are *ways*:
sets of its values that a forward may leave for its backward, from all of them to none, each with its bytes and with the time
that the rest takes to be made again.

What crosses a cut is held as a whole. Values that cross much of the program (masks, rotary tables, long skips), that leave
it, and that were drawn at random are *pinned*: the forward makes them once and they stay.

Segments with ways are those of Rockmate (Zhao et al., 2023, "Rockmate: an Efficient, Fast, Automatic and Generic Tool for
Re-materialization in PyTorch"); here they are found by bytes, and no module or block has to be named.
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
LONG = 0.25  # a value that is read after so much of the forward is pinned
MOST = 96  # segments
SHARED = 0.5  # of what crosses a cut: more may not cross the next one as well
MIN_SHARE = 0.002  # of all bytes are made in a segment at least
WAYS = 10  # of a segment


@dataclass(frozen=True)
class Way:
    """`kept` values (storages) of a segment stay from its forward to its backward: `bytes` of them that do not cross the
    cut behind it, and `shared` bytes that do. The rest takes `seconds` to make again. `forward` and `backward` are the bytes
    that are live at most while each runs, besides what crosses the cut before the segment; `whole` are those of the backward
    with that, as long as it is read there. The backward of one that is `alone` does not read it."""

    kept: frozenset[fx.Node]
    bytes: int
    shared: int
    seconds: float
    forward: int
    backward: int
    whole: int
    alone: bool


@dataclass(eq=False)
class Segment:
    """Nodes of the forward between two cuts, in order, and the nodes of the backward that belong to them.

    `before` and `behind` are the storages that cross the cuts on either side. `needs` are the storages that its backward
    reads besides `before`. `gradients` are the bytes of results that its backward makes, `tangents` those of other backward
    values that come into it, `dying` the ones among these that no earlier segment's reads. `ways` are ordered by bytes: the
    first keeps nothing, the last all.
    """

    nodes: list[fx.Node]
    backward: list[fx.Node]
    before: frozenset[fx.Node] = frozenset()
    behind: frozenset[fx.Node] = frozenset()
    needs: frozenset[fx.Node] = frozenset()
    seconds: float = 0.0
    backward_seconds: float = 0.0
    gradients: int = 0
    tangents: int = 0
    dying: frozenset[fx.Node] = frozenset()
    ways: list[Way] = field(default_factory=list)

    @property
    def input_bytes(self) -> int:
        return sum(map(most_bytes, self.before))

    @property
    def output_bytes(self) -> int:
        return sum(map(most_bytes, self.behind))


@dataclass(eq=False)
class Chain:
    """A program's segments, the storages that stay from the forward on, and backward nodes that belong to no segment
    (they stand where they stood: before all others)."""

    segments: list[Segment]
    pinned: frozenset[fx.Node]
    loose: list[fx.Node]

    def on(self, program: Program) -> Chain:
        """This chain on a copy of its program, whose nodes have the same names."""
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
    """Cut a captured program into its chain. Between two cuts `apart` times as many bytes are made, at least, as cross them."""
    return _Builder(program, costs, apart).build()


class _Builder:
    def __init__(self, program: Program, costs: Costs, apart: float) -> None:
        self.program = program
        self.apart = apart
        self.seconds = costs.compute(program)
        self.fused = costs.fused
        nodes = list(program.graph.nodes)
        self.on = sources(nodes, fused=False)
        # Values that take no memory where they are neither kept nor cross a cut: they are then written anew in their readers.
        inside = sources(nodes, fused=costs.fused)
        self.inlined = {n for n in nodes if self.on[n] == (n,) != inside[n]}
        calls = [n for n in program.graph.nodes if n.op == "call_function"]
        self.forward = [n for n in calls if info(n).phase is Phase.FORWARD]
        self.later = [n for n in calls if info(n).phase is not Phase.FORWARD]
        self.at = {n: i for i, n in enumerate(self.forward)}
        self.last: dict[fx.Node, int] = {}  # position of the last forward reader of a storage
        for i, node in enumerate(self.forward):
            for root in (*self.on[node], *self.storages(node)):
                if root in self.at and isinstance(value(root), torch.Tensor):  # (several results are values each)
                    self.last[root] = i
        self.results = {root_of(n) for p, n in program.output_items() if p.role is not OutputRole.GRADIENT}
        gradients = {p.name: root_of(n) for p, n in program.output_items() if p.role is OutputRole.GRADIENT}
        self.gradient_outputs = set(gradients.values())
        self.parts = {  # how many ranks will share a gradient
            gradients[name]: program.mesh[str(spec.shard_dim)]
            for name, spec in program.params.items()
            if name in gradients and spec.shard_dim is not None
        }
        reach = LONG * len(self.forward)
        self.pinned = {
            n for n, last in self.last.items() if n in self.results or made_once(n) or last - self.at[n] > reach
        }

    def storages(self, node: fx.Node) -> list[fx.Node]:
        """The storages that a node reads."""
        return [s for used in node.all_input_nodes for s in self.on[used]]

    def build(self) -> Chain:
        cuts = _few(self._unshared(self._cuts()), self.crossing)
        bounds = [0, *cuts, len(self.forward)]
        place = {}  # of each forward node: its segment
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
            }  # (read by an earlier segment's backward than its own)
            segment.needs = frozenset(r for r in read if place[r] == number)
        self._backward_crossings(segments)
        known: dict[str, list[tuple[frozenset[int], Way]]] = {}
        for segment in segments:
            segment.before -= self.pinned
            segment.behind -= self.pinned
            segment.seconds = sum(self.seconds.get(n, 0.0) for n in segment.nodes)
            segment.backward_seconds = sum(self.seconds.get(n, 0.0) for n in segment.backward)
            made = {root_of(n) for n in segment.backward if root_of(n) in self.gradient_outputs}
            segment.gradients = sum(most_bytes(n) // self.parts.get(n, 1) for n in made)
            segment.ways = self._ways(segment, known)
        return Chain(segments, frozenset(self.pinned), loose)

    # -- cuts -----------------------------------------------------------------------------------------------------------
    def _cuts(self) -> list[int]:
        """Positions before which the forward may be cut: where no more bytes cross than anywhere near."""
        change = [0] * (len(self.forward) + 2)
        made = [0] * (len(self.forward) + 1)  # bytes made before each position
        for node, last in self.last.items():
            born = self.at[node.all_input_nodes[0] if node.target is operator.getitem else node]
            made[born + 1] += own_bytes(node) if node not in self.inlined else 0
            if node not in self.pinned:
                change[born + 1] += own_bytes(node)
                change[last + 1] -= own_bytes(node)
        self.crossing, live = [], 0
        for position in range(len(self.forward) + 1):
            live += change[position]
            self.crossing.append(live)
            made[position] += made[position - 1] if position else 0
        ends = MIN_SHARE * made[-1]
        first, last = bisect.bisect_right(made, ends), bisect.bisect_left(made, made[-1] - ends)
        found: list[int] = []
        for position in range(first, last):
            here = self.crossing[position]
            reach = self.apart * max(here, 1)
            low = max(first, bisect.bisect_left(made, made[position] - reach))
            high = min(last, bisect.bisect_right(made, made[position] + reach))
            far = not found or made[position] - made[found[-1]] >= reach
            if far and here <= FLAT * min(self.crossing[low:high]) and not self._inside(position):
                found.append(position)
        return found

    def _unshared(self, cuts: list[int]) -> list[int]:
        """Without cuts that much the same values cross as another one next to them, which fewer cross: what crosses two
        cuts is counted at both."""
        kept: list[int] = []
        for cut in cuts:
            while kept and self._shared(kept[-1], cut) > SHARED * min(self.crossing[kept[-1]], self.crossing[cut]):
                if self.crossing[kept[-1]] <= self.crossing[cut]:
                    break
                kept.pop()
            else:
                kept.append(cut)
        return kept

    def _shared(self, first: int, second: int) -> int:
        return sum(map(most_bytes, self._crossing_at(first) & self._crossing_at(second)))

    def _inside(self, position: int) -> bool:
        """Would a cut here part an operator of several results from them?"""
        return position < len(self.forward) and self.forward[position].target is operator.getitem

    def _crossing_at(self, position: int) -> frozenset[fx.Node]:
        if position in (0, len(self.forward)):
            return frozenset()
        return frozenset(n for n, last in self.last.items() if self.at[n] < position <= last and n not in self.pinned)

    # -- the backward ----------------------------------------------------------------------------------------------------
    def _backward_parts(self, place: dict[fx.Node, int], count: int) -> tuple[list[list[fx.Node]], list[fx.Node]]:
        """The backward's nodes by segment. One that reads a value of the forward belongs to the segment of that value's last
        forward reader, but not after those of its operands. Any other stands with its first reader."""
        given = (InputRole.TANGENT, InputRole.RETURNED, InputRole.SCALE)  # what every segment may read, but for inputs
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
        """Sets the segments' `tangents` and `dying`."""
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
    def _ways(self, segment: Segment, known: dict[str, list[tuple[frozenset[int], Way]]]) -> list[Way]:
        """The ways of a segment, solved once for segments of equal nodes."""
        index = {n: i for i, n in enumerate(segment.nodes)}
        key = self._signature(segment, index)
        if key not in known:
            found = _Ways(segment, self).found()
            known[key] = [(frozenset(index[n] for n in way.kept), way) for way in found]
        return [replace(way, kept=frozenset(segment.nodes[i] for i in kept)) for kept, way in known[key]]

    def _signature(self, segment: Segment, index: dict[fx.Node, int]) -> str:
        local = dict(index)
        local.update({n: len(local) + i for i, n in enumerate([*segment.backward, *sorted(segment.dying)])})

        def shown(node: fx.Node) -> str:
            return f"{signature(node)} {most_bytes(node)} {[local.get(a, -1) for a in node.all_input_nodes]}"

        kept = sorted(index[n] for n in segment.needs)
        out = sorted(index.get(n, -1) for n in segment.behind)
        return "\n".join(
            [*map(shown, segment.nodes), "", *map(shown, segment.backward), f"{kept} {out} {segment.tangents}"]
        )


class _Ways:
    """Finds a segment's ways: from all that its backward needs, the value that saves most bytes per second goes first. One that can
    be made of what comes into the segment only saves none, if this would not have to be there but for it."""

    def __init__(self, segment: Segment, builder: _Builder) -> None:
        self.segment = segment
        self.seconds = builder.seconds
        self.gradients = builder.gradient_outputs
        self.given = builder.pinned
        self.on = builder.on
        self.storages = builder.storages
        self.fused = builder.fused
        self.inlined = builder.inlined

    def found(self) -> list[Way]:
        kept = set(self.segment.needs)
        ways = [self._way(frozenset(kept))]
        while kept:
            now = ways[-1]
            options = []
            for one in kept:
                seconds, alone = self._again(backward_order(self.segment, self.given.union(kept - {one})))
                saved = most_bytes(one) - self.segment.input_bytes * (now.alone and not alone)
                options.append(((seconds - now.seconds) / max(saved, 1), -saved, one.name, one))
            kept.remove(min(options)[3])
            ways.append(self._way(frozenset(kept)))
        ways.reverse()
        return _thinned(ways)

    def _again(self, order: list[fx.Node]) -> tuple[float, bool]:
        """The seconds of what a backward of this order makes again, and whether it is alone."""
        again = set(order)
        seconds = sum(self.seconds.get(n, 0.0) for n in self.segment.nodes if n in again)
        return seconds, self.segment.before.isdisjoint(r for n in order for r in self.storages(n))

    def _way(self, kept: frozenset[fx.Node]) -> Way:
        segment = self.segment
        shared = sum(map(most_bytes, kept & segment.behind))
        held = sum(map(most_bytes, kept)) - shared
        order = backward_order(segment, kept | self.given)
        seconds, alone = self._again(order)
        besides = self._backward_peak(order, kept, there=True)
        whole = besides if alone else self._backward_peak(order, kept, there=False)
        return Way(kept, held, shared, seconds, self._forward_peak(kept), besides, whole, alone)

    def _forward_peak(self, kept: frozenset[fx.Node]) -> int:
        stays = kept | self.segment.behind
        return self._peak(self.segment.nodes, set(), stays, self.given, 0)

    def _backward_peak(self, order: list[fx.Node], kept: frozenset[fx.Node], there: bool) -> int:
        """Is what comes into the segment `there` all the time, or until it was read?"""
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
        """The most bytes at once: `base`, the storages `live` at first, and those that are made, each until its last reader or, if
        it `stays`, for good. Of `given` nothing counts."""
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
        held = {n for n in live if n not in given}
        now = base + sum(map(most_bytes, held))
        most = now
        ends: dict[int, list[fx.Node]] = {}
        for root, i in last.items():
            ends.setdefault(i, []).append(root)
        for i, node in enumerate(order):
            if on[node] == (node,) and node not in held and node not in given:
                held.add(node)  # (the bytes of several results come with their operator)
                now += 0 if node.target is operator.getitem else most_bytes(node)
            dying = [root for root in ends.get(i, []) if root in held and root not in stays]
            place = (
                self.fused
                and pointwise(node)
                and any(most_bytes(r) == most_bytes(node) for r in dying if r not in fixed)
            )
            most = max(most, now - (most_bytes(node) if place else 0))  # (its result may take the place of an operand)
            for root in dying:
                held.discard(root)
                now -= own_bytes(root)
        return most


def backward_order(segment: Segment, available: Collection[fx.Node]) -> list[fx.Node]:
    """The order in which a segment's backward runs if of its storages only the `available` ones are there: its nodes, and
    those of the forward that must run again, each just before its first reader."""
    own = set(segment.nodes)
    made: set[fx.Node] = set()
    order: list[fx.Node] = []

    def make(node: fx.Node) -> None:
        if node in made or node not in own or (root_of(node) is node and node in available):
            return
        if collectives.is_wait(node):  # (what came from other ranks is kept)
            return
        for used in node.all_input_nodes:
            make(used)
        made.add(node)
        order.append(node)

    for node in segment.backward:
        for used in node.all_input_nodes:
            make(used)
        order.append(node)
    return order


def _thinned(ways: list[Way]) -> list[Way]:
    """At most `WAYS`, with the first and the last, none of which another one beats in bytes and in seconds."""
    best: list[Way] = []
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
    """At most `MOST` - 1 of the cuts, evenly spread."""
    if len(cuts) < MOST:
        return cuts
    step = len(cuts) / (MOST - 1)
    groups = [cuts[int(i * step) : max(int((i + 1) * step), int(i * step) + 1)] for i in range(MOST - 1)]
    return [min(group, key=lambda p: (crossing[p], p)) for group in groups if group]

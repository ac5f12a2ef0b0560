"""Which segments of a chain keep what, and which are computed again, how often: the fastest order within a memory.

A dynamic program over segments i to j with `m` bytes to spend. What comes into segment i is there. Its values are kept by one
of its ways, and the segments behind it get what is left; or it is computed up to some segment k, of which only the input is
kept, and once k to j are done all over again. This is Rotor (Beaumont et al., 2019, "Optimal checkpointing for heterogeneous
chains: how to train deep neural networks with limited memory"), with ways as in Rockmate, and with gradients, which grow while
the backward goes on. Bytes are counted in slots, so that a table has as many columns for a large model as for a small one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zgraph.passes.chain import Chain, Segment, chain_of
from zgraph.passes.costs import Costs
from zgraph.program.program import Program

SLOTS = 1500
APART = (2.0, 1.0)  # of the cuts of coarse and of fine chains (see `chain_of`)


@dataclass(frozen=True)
class Keep:
    """Run a segment's forward and leave what its `way` keeps; then `rest`, of the segments behind it (None: there are none); then
    its backward."""

    segment: int
    way: int
    rest: Schedule | None


@dataclass(frozen=True)
class Again:
    """Run the forward up to segment `until` and keep nothing but what comes into it; then `rest`, which begins there; then the
    segments before it all over, as `later` says."""

    until: int
    rest: Schedule
    later: Schedule


Schedule = Keep | Again


class Rotor:
    """The table for one chain. `bytes` is the most that any schedule has a use for."""

    def __init__(self, segments: Sequence[Segment], slots: int = SLOTS) -> None:
        self.segments = segments
        n = len(segments)
        self.bytes = _most(segments)
        self.slot = max(self.bytes / slots, 1.0)
        self.slots = slots + 2 * n + 2  # (sizes are rounded to slots: what keeps all may take so many more)
        self.enter = [self._in_slots(s.input_bytes) for s in segments] + [0]
        self.cost = np.concatenate([[0.0], np.cumsum([s.seconds for s in segments])])
        self.grads = np.concatenate([[0], np.cumsum([s.gradients for s in segments])])
        self.tangents = [self._in_slots(s.tangents) for s in segments]
        self.again: dict[tuple[int, int], NDArray[np.float64]] = {}
        self.first: list[NDArray[np.float64]] = [np.empty(0)] * n
        for length in range(1, n + 1):
            for i in range(n - length + 1):
                self.again[i, i + length - 1] = self._best(i, i + length - 1, first=False)
        for i in range(n - 1, -1, -1):
            self.first[i] = self._best(i, n - 1, first=True)

    def least(self) -> int:
        """The fewest bytes for which there is a schedule."""
        fits = np.isfinite(self.first[0])
        return int(fits.argmax() * self.slot) + 1 if fits.any() else self.bytes

    def seconds(self, size: int) -> float:
        """What the best schedule within `size` bytes takes; infinite if there is none."""
        return float(self.first[0][self._column(size)])

    def schedule(self, size: int) -> Schedule | None:
        """The best schedule within `size` bytes of what lives between the forward and the backward."""
        column = self._column(size)
        if not np.isfinite(self.first[0][column]):
            return None
        return self._read(0, len(self.segments) - 1, column, first=True)

    # -- the table -------------------------------------------------------------------------------------------------------
    def _in_slots(self, size: int) -> int:
        return round(size / self.slot)

    def _column(self, size: int) -> int:
        return max(0, min(int(size / self.slot), self.slots))

    def _table(self, i: int, j: int, first: bool) -> NDArray[np.float64]:
        return self.first[i] if first else self.again[i, j]

    def _best(self, i: int, j: int, first: bool) -> NDArray[np.float64]:
        best = np.full(self.slots + 1, np.inf)
        for seconds, least, parts, _ in self._choices(i, j, first):
            total = np.full(self.slots + 1, float(seconds))
            for table, spent in parts:
                total[:spent] = np.inf
                total[spent:] += table[: self.slots + 1 - spent] if spent else table
            total[: min(least, self.slots + 1)] = np.inf
            np.minimum(best, total, out=best)
        return best

    def _choices(
        self, i: int, j: int, first: bool
    ) -> Iterator[tuple[float, int, list[tuple[NDArray[np.float64], int]], tuple[str, int]]]:
        """What may be done with segments i to j: (seconds of its own, the fewest slots, the tables that it goes on with and the
        slots that they do not get, which it is: a way (its number) that segment i is kept by, or the segment up to which nothing is
        kept)."""
        segment = self.segments[i]
        behind = 0 if first else self.tangents[j]
        if i == j:
            if first:  # the last segment: its forward goes over into its backward
                way = segment.ways[-1]
                least = self._in_slots(max(way.forward, way.backward))
                yield segment.seconds + segment.backward_seconds, least, [], ("keep", len(segment.ways) - 1)
                return
            way = segment.ways[0]
            yield way.seconds + segment.backward_seconds, self._in_slots(way.backward), [], ("keep", 0)
            return
        for number, way in enumerate(segment.ways):
            if number == 0 and len(segment.ways) > 1 and not way.bytes:
                continue  # (the same as computing it again)
            spent = self._in_slots(way.bytes) + self.enter[i + 1]
            least = max(
                self._in_slots(way.forward) + behind,
                self._in_slots(way.backward + int(self.grads[j + 1] - self.grads[i + 1])),
            )
            seconds = segment.seconds + way.seconds + segment.backward_seconds
            yield seconds, least, [(self._table(i + 1, j, first), spent)], ("keep", number)
        least = 0
        for k in range(i + 1, j + 1):
            passed = self.segments[k - 1]
            held = self.enter[k - 1] if k - 1 > i else 0
            least = max(least, self._in_slots(passed.ways[0].forward) + held + behind)
            grown = self._in_slots(int(self.grads[j + 1] - self.grads[k]))
            yield (
                float(self.cost[k] - self.cost[i]),
                least,
                [(self._table(k, j, first), self.enter[k]), (self.again[i, k - 1], grown)],
                ("again", k),
            )

    def _read(self, i: int, j: int, column: int, first: bool) -> Schedule:
        """The schedule behind a cell of the table."""
        best, rests = np.inf, []
        chosen: tuple[str, int] | None = None
        for seconds, least, parts, which in self._choices(i, j, first):
            if column < least or any(column < spent for _, spent in parts):
                continue
            total = seconds + sum(float(table[column - spent]) for table, spent in parts)
            if total < best:
                best, chosen, rests = total, which, [spent for _, spent in parts]
        assert chosen is not None, (i, j, column)
        kind, number = chosen
        if kind == "keep":
            return Keep(i, number, self._read(i + 1, j, column - rests[0], first) if j > i else None)
        rest = self._read(number, j, column - rests[0], first)
        return Again(number, rest, self._read(i, number - 1, column - rests[1], first=False))


class Solver:
    """The best schedules of a program, whose forward is cut both coarsely and finely: of fine segments fewer values need be there at
    once, but more values cross their cuts."""

    def __init__(self, program: Program, costs: Costs) -> None:
        chains = [chain_of(program, costs, apart) for apart in APART]
        self.rotors = [(chain, Rotor(chain.segments)) for chain in chains]
        self.bytes = self.rotors[0][1].bytes

    def least(self) -> int:
        """The fewest bytes for which there is a schedule."""
        return min(rotor.least() for _, rotor in self.rotors)

    def schedule(self, size: int) -> tuple[Chain, Schedule]:
        """The best schedule within `size` bytes, or the least that there is one for, and the chain that it is of."""
        size = max(size, self.least())
        chain, rotor = min(self.rotors, key=lambda way: way[1].seconds(size))
        found = rotor.schedule(size)
        assert found is not None
        return chain, found


def _most(segments: Sequence[Segment]) -> int:
    """The bytes at the peak of the schedule that computes nothing again."""
    most = held = 0
    gradients = 0
    for segment in segments:
        way = segment.ways[-1]
        most = max(most, held + way.forward)
        held += way.bytes + segment.output_bytes
    for segment in reversed(segments):
        way = segment.ways[-1]
        held -= way.bytes + segment.output_bytes
        most = max(most, held + way.backward + gradients)
        gradients += segment.gradients
    return most


def every_segment_again(segments: Sequence[Segment], first: int = 0) -> Schedule:
    """The schedule of full activation checkpointing: what comes into each segment is kept, and nothing else."""
    last = len(segments) - 1
    if first == last:
        return Keep(last, len(segments[last].ways) - 1, None)
    return Again(first + 1, every_segment_again(segments, first + 1), Keep(first, 0, None))

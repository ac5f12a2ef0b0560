"""Chooses which segments of a chain keep what, and which are recomputed, how often: the fastest schedule within a
memory budget.

A dynamic program over segments i to j with `m` bytes to spend. Either segment i's values are kept by one of its ways,
and the segments after it get the bytes that are left; or the forward runs up to some segment k, of which only the input
is kept, and once k to j are done i to k - 1 are computed again. This is Rotor (Beaumont et al., 2019, "Optimal
checkpointing for heterogeneous chains: how to train deep neural networks with limited memory"), with ways as in
Rockmate, and with gradients, which grow while the backward goes on. The input of segment i is held from outside; or the
`m` bytes have to do for it too, as long as it is read. Bytes are counted in slots, so that a table has as many columns
for a large model as for a small one.

In a pipeline other micro-batches wait between their forward and their backward (`WaitingRotor`): what the first run of
the forward keeps is in memory once for each of them, what is recomputed only once. So tables of the first run have a
second dimension: the most bytes that it keeps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zgraph.passes.analysis.costs import Costs
from zgraph.passes.remat.segments import Chain, Segment, SegmentOption, chain_of
from zgraph.program.program import Program

SLOTS = 1500
ROWS = 48  # rows of a table: sizes of what a forward keeps, where other micro-batches wait
SLOWEST = 2.0  # times the time that keeping all takes: slower schedules are of no use
APART = (2.0, 1.0)  # the distances between cuts in coarse and in fine chains (see `chain_of`)


@dataclass(frozen=True)
class Keep:
    """A schedule that runs a segment's forward and keeps what its way keeps, then runs `rest`, then the segment's
    backward.
    """

    segment: int  # the segment's position
    way: int  # the position of the way among the segment's
    rest: Schedule | None  # the schedule of the segments after it, None if there are none


@dataclass(frozen=True)
class Again:
    """A schedule that runs the forward up to a segment and keeps only that segment's input, then runs `rest`, then
    recomputes the segments before it.
    """

    until: int  # the segment
    # the schedule that begins with it; None: the forward runs to its end, and nothing is kept of it
    rest: Schedule | None
    later: Schedule  # the schedule of the segments before it, when they are computed again


Schedule = Keep | Again


class _Key(NamedTuple):
    """The key of a table: a range of segments and how they run."""

    i: int  # the first segment
    j: int  # the last segment
    first: bool  # whether they run for the first time in the forward, or later
    held: bool  # whether the input of segment i is held from outside


class _Choice(NamedTuple):
    """One way to run the segments of a table."""

    kind: str  # "keep": keep values of segment i; "again": run up to another segment and recompute later
    number: int  # the way by which it is kept, or the other segment
    seconds: float  # its own, without the parts'
    least: int  # the fewest slots that it needs
    parts: list[tuple[_Key, int]]  # the tables of the other segments, each with the slots that it does not get


class Rotor:
    """The tables for one chain. `bytes` is the most that any schedule has a use for.

    One that is not `strict` counts only what is held from one segment to another, not what segments need while they
    run, which is known less well.
    """

    def __init__(self, segments: Sequence[Segment], strict: bool = True, slots: int = SLOTS) -> None:
        self.segments = segments
        self.strict = strict
        n = len(segments)
        self.bytes = _most(segments)
        self.slot = max(self.bytes / slots, 1.0)
        # (sizes are rounded to slots: a schedule that keeps all may take up to 2 n + 2 more)
        self.slots = slots + 2 * n + 2
        self.enter = [self._in_slots(s.input_bytes) for s in segments] + [0]
        self.cost = np.concatenate([[0.0], np.cumsum([s.seconds for s in segments])])
        grads = itertools.accumulate((s.gradients for s in segments), initial=0)
        self.grads = [
            self._in_slots(size) for size in grads
        ]  # (sums are rounded, not terms: so differences of sums add up)
        self.tangents = [self._in_slots(s.tangents) for s in segments]
        self.tables: dict[_Key, NDArray[np.float64]] = {}
        for length in range(1, n + 1):
            for i in range(n - length + 1):
                self._fill(i, i + length - 1, first=False)
        for i in range(n - 1, -1, -1):
            self._fill(i, n - 1, first=True)
        self.whole = _Key(0, n - 1, first=True, held=True)

    def sizes(self) -> list[int]:
        """Return the bytes from which on there is a schedule, and from which on there is a faster one, ascending."""
        table = self.tables[self.whole]
        faster = np.flatnonzero(table < np.concatenate([[np.inf], table[:-1]]))
        return [int(column * self.slot) + 1 for column in faster] or [self.bytes]

    def least(self) -> int:
        """Return the fewest bytes for which there is a schedule."""
        return self.sizes()[0]

    def seconds(self, size: int) -> float:
        """Return the seconds of the best schedule within `size` bytes; infinite if there is none."""
        return float(self.tables[self.whole][self._column(size)])

    def schedule(self, size: int) -> Schedule | None:
        """Return the best schedule within `size` bytes of what lives between the forward and the backward, None if
        there is none.
        """
        column = self._column(size)
        return None if np.isinf(self.tables[self.whole][column]) else self._read(self.whole, column)

    # -- the table -------------------------------------------------------------------------------------------------------
    def _in_slots(self, size: int) -> int:
        return round(size / self.slot)

    def _column(self, size: int) -> int:
        return max(0, min(int(size / self.slot), self.slots))

    def _fill(self, i: int, j: int, first: bool) -> None:
        for input_is_held in (True, False):
            key = _Key(i, j, first, input_is_held)
            self.tables[key] = best = np.full(self.slots + 1, np.inf)
            for choice in self._choices(key):
                total = np.full(self.slots + 1, choice.seconds)
                for table, spent in choice.parts:
                    total[:spent] = np.inf
                    total[spent:] += self.tables[table][: self.slots + 1 - spent]
                total[: min(self._least(choice), self.slots + 1)] = np.inf
                np.minimum(best, total, out=best)

    def _least(self, choice: _Choice) -> int:
        return choice.least if self.strict else 0

    def _choices(self, key: _Key) -> Iterator[_Choice]:
        i, j, first, input_is_held = key
        segment = self.segments[i]
        behind = 0 if first else self.tangents[j]
        comes = 0 if input_is_held else self.enter[i]
        ways = list(enumerate(segment.ways))
        if i == j:  # the last segment's backward follows its forward directly
            ways = ways[-1:] if first else ways[:1]
        for number, way in ways:
            if number == 0 and i < j and len(ways) > 1 and not way.kept:
                continue  # (keeping nothing is the same as recomputing all)
            forward = self._in_slots(way.forward) + comes + behind if i < j or first else 0
            grown = self.grads[j + 1] - self.grads[i + 1]
            least = max(forward, self._in_slots(way.backward if input_is_held else way.whole) + grown)
            own = segment.seconds if i < j or first else 0.0
            again = way.seconds if i < j or not first else 0.0
            for parts in self._behind(key, way) if i < j else [[]]:
                yield _Choice("keep", number, own + again + segment.backward_seconds, least, parts)
        least = 0
        for k in range(i + 1, j + 1):
            passed = self.segments[k - 1]
            passes = self.enter[k - 1] if k - 1 > i else 0
            least = max(least, self._in_slots(passed.ways[0].forward) + comes + passes + behind)
            grown = self.grads[j + 1] - self.grads[k]
            parts = [(_Key(k, j, first, held=False), comes), (_Key(i, k - 1, first=False, held=input_is_held), grown)]
            yield _Choice("again", k, float(self.cost[k] - self.cost[i]), least, parts)

    def _behind(self, key: _Key, way: SegmentOption) -> list[list[tuple[_Key, int]]]:
        """Return how the segments after one that is kept this way may go on: what it shares with their input counts
        once.
        """
        rest = key._replace(i=key.i + 1, held=False)
        spent = self._in_slots(way.bytes) + (0 if key.held or way.alone else self.enter[key.i])
        if not way.shared:
            return [[(rest, spent)]]
        shared = self._in_slots(way.shared)
        return [[(rest._replace(held=True), spent + self.enter[key.i + 1])], [(rest, spent + shared)]]

    def _read(self, key: _Key, column: int) -> Schedule:
        """Return the schedule of a cell of the table."""
        best, chosen = np.inf, None
        for choice in self._choices(key):
            if column < self._least(choice) or any(column < spent for _, spent in choice.parts):
                continue
            total = choice.seconds + sum(float(self.tables[table][column - spent]) for table, spent in choice.parts)
            if total < best:
                best, chosen = total, choice
        assert chosen is not None, (key, column)
        rests = [self._read(table, column - spent) for table, spent in chosen.parts]
        if chosen.kind == "keep":
            return Keep(key.i, chosen.number, rests[0] if rests else None)
        return Again(chosen.number, *rests)


class WaitingRotor(Rotor):
    """The tables for a chain whose forward runs for `others` further micro-batches before its backward does.

    All bytes are those of the schedule's own values and of what the forward has kept for the others.
    """

    def __init__(self, segments: Sequence[Segment], others: int, strict: bool = True, slots: int = SLOTS) -> None:
        super().__init__(segments, strict, slots)
        self.row = -(-self.slots // ROWS)  # slots in a row
        self.kept: dict[_Key, NDArray[np.float64]] = {}
        for i in range(len(segments) - 1, -1, -1):
            for input_is_held in (True, False):
                self._fill_kept(_Key(i, len(segments) - 1, first=True, held=input_is_held))
        step = others * self.row
        whole = self.kept[self.whole]
        self.totals = np.full(whole.shape[1] + step * ROWS, np.inf)
        self.rows = np.zeros(self.totals.size, dtype=np.int64)
        for row, seconds in enumerate(whole):
            columns = slice(row * step, row * step + seconds.size)
            self.rows[columns][seconds < self.totals[columns]] = row
            self.totals[columns] = np.minimum(self.totals[columns], seconds)
        self.best = np.minimum.accumulate(self.totals)
        self.step = step
        self.bytes += int(others * self.row * ROWS * self.slot)

    def sizes(self) -> list[int]:
        faster = np.flatnonzero(self.best < np.concatenate([[np.inf], self.best[:-1]]))
        return [int(column * self.slot) + 1 for column in faster] or [self.bytes]

    def seconds(self, size: int) -> float:
        return float(self.best[self._total(size)])

    def schedule(self, size: int) -> Schedule | None:
        best = self.best[self._total(size)]
        if np.isinf(best):
            return None
        column = int(np.argmax(self.totals == best))
        row = int(self.rows[column])
        return self._read_kept(self.whole, row, column - row * self.step)

    def _total(self, size: int) -> int:
        return max(0, min(int(size / self.slot), self.best.size - 1))

    def _fill_kept(self, key: _Key) -> None:
        self.kept[key] = best = np.full((ROWS + 1, self.slots + 1), np.inf)
        for choice, kept_rows in self._first_choices(key):
            total = np.full_like(best, choice.seconds)
            for table, spent in choice.parts:
                rest = self._table(table, kept_rows)
                total[:, :spent] = np.inf
                total[:, spent:] += rest[..., : self.slots + 1 - spent]
            total[:kept_rows] = np.inf
            total[:, : min(self._least(choice), self.slots + 1)] = np.inf
            np.minimum(best, total, out=best)

    def _table(self, key: _Key, kept: int) -> NDArray[np.float64]:
        """Return a table [row, column], or one row for all, shifted by the `kept` rows that were kept before."""
        if not key.first:
            return self.tables[key][None]
        shifted = np.full_like(self.kept[key], np.inf)
        shifted[kept:] = self.kept[key][: ROWS + 1 - kept]
        return shifted

    def _first_choices(self, key: _Key) -> Iterator[tuple[_Choice, int]]:
        """Yield the choices for the first run, each with the rows of bytes that it keeps for the backward."""
        i, j, _, input_is_held = key
        comes = 0 if input_is_held else self.enter[i]
        for choice in self._choices(key):
            if choice.parts:
                yield choice, self._in_rows(choice.parts[0][1])
        forwards = [self._in_slots(s.ways[0].forward) + self.enter[at] for at, s in enumerate(self.segments[i:], i)]
        if i == j:  # (the last segment's kept values live as long as those of the other micro-batches)
            for number, way in enumerate(self.segments[i].ways):
                spent = self._in_slots(way.bytes) + (0 if input_is_held or way.alone else self.enter[i])
                needed = self._in_slots(way.backward if input_is_held else way.whole)
                seconds = self.segments[i].seconds + way.seconds + self.segments[i].backward_seconds
                least = max(self._in_slots(way.forward) + comes, needed, spent)
                yield _Choice("keep", number, seconds, least, []), self._in_rows(spent)
        else:
            later = [(_Key(i, j, first=False, held=input_is_held), 0)]
            seconds = float(self.cost[j + 1] - self.cost[i])
            yield _Choice("again", j + 1, seconds, comes + max(forwards), later), self._in_rows(comes)

    def _in_rows(self, slots: int) -> int:
        return min(round(slots / self.row), ROWS + 1)

    def _read_kept(self, key: _Key, row: int, column: int) -> Schedule:
        best, chosen, left = np.inf, None, 0
        for choice, kept_rows in self._first_choices(key):
            if row < kept_rows or column < self._least(choice) or any(column < spent for _, spent in choice.parts):
                continue
            total = choice.seconds
            for table, spent in choice.parts:
                seen = self.kept[table][row - kept_rows] if table.first else self.tables[table]
                total += float(seen[column - spent])
            if total < best:
                best, chosen, left = total, choice, row - kept_rows
        assert chosen is not None, (key, row, column)
        rests = [
            self._read_kept(table, left, column - spent) if table.first else self._read(table, column - spent)
            for table, spent in chosen.parts
        ]
        if chosen.kind == "keep":
            return Keep(key.i, chosen.number, rests[0] if rests else None)
        return Again(chosen.number, rests[0], rests[1]) if len(rests) > 1 else Again(chosen.number, None, rests[0])


class Solver:
    """The best schedules of a program, whose forward is cut both coarsely and finely: fine segments need fewer values
    at once, but more values cross their cuts.

    For fewer bytes than segments seem to need, a schedule of fine segments counts only what is held between them: their
    needs may be overestimated. `sizes` are the bytes from which on there is a schedule, and from which on there is a
    faster one, ascending; `least()` is one of them. With other micro-batches `waiting`, bytes are those of all of them.
    """

    def __init__(self, program: Program, costs: Costs, waiting: int = 0) -> None:
        def rotor(chain: Chain, strict: bool = True) -> Rotor:
            return WaitingRotor(chain.segments, waiting, strict) if waiting else Rotor(chain.segments, strict)

        chains = [chain_of(program, costs, apart) for apart in APART]
        self.rotors = [(chain, rotor(chain)) for chain in chains]
        self.lax = (chains[-1], rotor(chains[-1], strict=False))
        self.bytes = self.rotors[0][1].bytes
        self.known = min(rotor.least() for _, rotor in self.rotors)
        self.sizes = self._sizes()

    def least(self) -> int:
        """Return the fewest bytes for which there is a schedule, as far as segments' needs are known."""
        return self.known

    def seconds(self, size: int) -> float:
        """Return the seconds of the best schedule within `size` bytes."""
        return min(rotor.seconds(size) for _, rotor in self._those_for(size))

    def schedule(self, size: int) -> tuple[Chain, Schedule]:
        """Return the best schedule within `size` bytes, or within the least for which there is one, and its chain."""
        size = max(size, self.sizes[0])
        chain, rotor = min(self._those_for(size), key=lambda way: way[1].seconds(size))
        schedule = rotor.schedule(size)
        assert schedule is not None
        return chain, schedule

    def _those_for(self, size: int) -> list[tuple[Chain, Rotor]]:
        return self.rotors if size >= self.known else [self.lax]

    def _sizes(self) -> list[int]:
        sizes: list[int] = []
        best, known = SLOWEST * self.seconds(self.bytes), self.seconds(self.known)
        for size in sorted({size for _, rotor in (*self.rotors, self.lax) for size in rotor.sizes()}):
            seconds = self.seconds(size)
            if size == self.known or (seconds < best and (size > self.known or seconds > known)):
                sizes.append(size)
                best = seconds
        return sizes


def _most(segments: Sequence[Segment]) -> int:
    """Return the bytes at the peak of the schedule that recomputes nothing."""
    most = live_bytes = gradients = 0
    sizes = []
    for segment, later in zip(segments, [*segments[1:], None], strict=True):
        way = segment.ways[-1]
        most = max(most, live_bytes + way.forward + (segment.input_bytes if way.alone else 0))
        sizes.append(way.bytes + (way.shared if later is None or later.ways[-1].alone else segment.output_bytes))
        live_bytes += sizes[-1]
    for segment, size in zip(reversed(segments), reversed(sizes), strict=True):
        way = segment.ways[-1]
        live_bytes -= size
        most = max(most, live_bytes - (0 if way.alone else segment.input_bytes) + way.whole + gradients)
        gradients += segment.gradients
    return most


def recompute_every_segment(segments: Sequence[Segment], first: int = 0) -> Schedule:
    """Return the schedule of full activation checkpointing: the input of each segment is kept, and nothing else."""
    last = len(segments) - 1
    if first == last:
        return Keep(last, len(segments[last].ways) - 1, None)
    return Again(first + 1, recompute_every_segment(segments, first + 1), Keep(first, 0, None))

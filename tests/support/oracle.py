"""What recomputation of a chain can reach at best: exact, slow, and told apart from the solver by how it is found.

For segments i to j it has the whole frontier of (bytes, seconds) that no other schedule beats in both, with bytes as they are,
where `zgraph/passes/remat/solver.py` has a table over slots.
"""

from __future__ import annotations

from zgraph.passes.remat.segments import Segment

Point = tuple[int, float]


class Oracle:
    def __init__(self, segments: list[Segment]) -> None:
        self.segments = segments
        self.known: dict[tuple[int, int, bool, bool], list[Point]] = {}

    def least(self) -> int:
        """The fewest bytes between forward and backward for which there is a schedule at all."""
        return self.frontier(0, len(self.segments) - 1, True)[0][0]

    def seconds(self, size: int) -> float:
        """Of the fastest schedule within `size` bytes."""
        return min(s for b, s in self.frontier(0, len(self.segments) - 1, True) if b <= size)

    def frontier(self, i: int, j: int, first: bool, held: bool = True) -> list[Point]:
        """Of segments i to j; what comes into them is `held` from outside, or counts as long as it is read."""
        key = (i, j, first, held)
        if key not in self.known:
            self.known[key] = _pareto(self._keeping(*key) + self._again(*key))
        return self.known[key]

    def _keeping(self, i: int, j: int, first: bool, held: bool) -> list[Point]:
        """Segment i leaves what one of its ways keeps."""
        own = self.segments[i]
        comes = 0 if held else own.input_bytes
        if i == j:
            way = own.ways[-1] if first else own.ways[0]
            forward = (comes + way.forward, own.seconds) if first else (0, way.seconds)
            return [(max(forward[0], way.backward if held else way.whole), forward[1] + own.backward_seconds)]
        found = []
        grown = sum(s.gradients for s in self.segments[i + 1 : j + 1])
        for way in own.ways:
            stays = way.bytes + (0 if way.alone else comes)
            after = [(stays + self.segments[i + 1].input_bytes + b, s) for b, s in self.frontier(i + 1, j, first)]
            after += [(stays + way.shared + b, s) for b, s in self.frontier(i + 1, j, first, held=False)]
            backward = (way.backward if held else way.whole) + grown
            for size, seconds in after:
                peak = max(comes + way.forward + self._behind(j, first), size, backward)
                found.append((peak, own.seconds + seconds + way.seconds + own.backward_seconds))
        return found

    def _again(self, i: int, j: int, first: bool, held: bool) -> list[Point]:
        """Nothing stays of segments i to k - 1 but what comes into k."""
        found = []
        comes = 0 if held else self.segments[i].input_bytes
        for k in range(i + 1, j + 1):
            passing = max(
                self.segments[t].ways[0].forward + (self.segments[t].input_bytes if t > i else 0) for t in range(i, k)
            )
            passing += comes + self._behind(j, first)
            seconds = sum(s.seconds for s in self.segments[i:k])
            grown = sum(s.gradients for s in self.segments[k : j + 1])
            for size, rest in self.frontier(k, j, first, held=False):
                for later_size, later in self.frontier(i, k - 1, False, held):
                    found.append((max(passing, comes + size, grown + later_size), seconds + rest + later))
        return found

    def _behind(self, j: int, first: bool) -> int:
        return 0 if first else self.segments[j].tangents


def _pareto(points: list[Point]) -> list[Point]:
    found: list[Point] = []
    for size, seconds in sorted(points):
        if not found or seconds < found[-1][1] - 1e-12:
            found.append((size, seconds))
    return found

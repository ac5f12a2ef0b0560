"""Streams that work beside each other, in simulated time. The simulator replays a program on a timeline; the overlap
pass plans on one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

COMPUTE = "compute"
HOST = "host"
LINK = "link"


@dataclass(frozen=True, slots=True)
class Span:
    """The work of one node on one lane. A bucket has one span, named after its first start."""

    node: str  # the node's name
    lane: str  # "compute", "link:dp", "h2d", "d2h", "nvme" or "host"
    start: float  # when it begins, in seconds after the program's first node
    seconds: float  # how long it takes


class Timeline:
    """The times until which each stream is busy, in seconds after the first operator; and the spans of named work.

    All collectives share one link. `lead` are seconds that it has before the first operator.
    """

    def __init__(self, lead: float = 0.0) -> None:
        self._ready: dict[str, float] = {LINK: -lead}
        self.spans: list[Span] = []

    def now(self, stream: str = COMPUTE) -> float:
        """Return when a stream has done all that it was given."""
        return self._ready.get(stream, 0.0)

    def set(self, stream: str, now: float) -> None:
        """Set when a stream is done with work that is no part of the timeline."""
        self._ready[stream] = now

    def run(
        self,
        stream: str,
        seconds: float,
        earliest: float | None = None,
        node: str | None = None,
        lane: str | None = None,
    ) -> float:
        """Occupy a stream once it is ready, not before `earliest`, and return when it is done. A named `node` leaves a
        span in `lane`.
        """
        begins = self.now(stream) if earliest is None else max(earliest, self.now(stream))
        if node is not None and seconds:
            self.spans.append(Span(node, lane or stream, begins, seconds))
        self._ready[stream] = begins + seconds
        return self._ready[stream]

    def wait(self, until: float, stream: str = COMPUTE) -> None:
        """Keep a stream idle until a time."""
        self._ready[stream] = max(self.now(stream), until)

    def end(self) -> float:
        """Return when all streams are done."""
        return max(0.0, *self._ready.values())

    def busy(self) -> dict[str, float]:
        """Return the seconds that each lane is occupied."""
        seconds: Counter[str] = Counter()
        for span in self.spans:
            seconds[span.lane] += span.seconds  # type: ignore[assignment]
        return dict(seconds)

"""Streams that work beside each other, in simulated time. The simulator replays a program on one; the overlap pass plans on one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

COMPUTE = "compute"
HOST = "host"
LINK = "link"


@dataclass(frozen=True, slots=True)
class Span:
    """What a node does occupies a lane ("compute", "link:dp", "h2d", "d2h", "nvme", "host") from `start` on, in seconds after the
    program's first node. A bucket's is its first start's."""

    node: str
    lane: str
    start: float
    seconds: float


class Timeline:
    """Until when each stream is busy, in seconds after the first operator; and what they did, where it was given a name.

    All collectives share one link. `lead` are seconds that it has before the first operator.
    """

    def __init__(self, lead: float = 0.0) -> None:
        self._ready: dict[str, float] = {LINK: -lead}
        self.spans: list[Span] = []

    def now(self, stream: str = COMPUTE) -> float:
        """When a stream has done all that it was given."""
        return self._ready.get(stream, 0.0)

    def set(self, stream: str, now: float) -> None:
        """Say when a stream is done with what is no part of the timeline."""
        self._ready[stream] = now

    def run(
        self,
        stream: str,
        seconds: float,
        earliest: float | None = None,
        node: str | None = None,
        lane: str | None = None,
    ) -> float:
        """Occupy a stream once it is ready, not before `earliest`; returns when it is done. A named `node` leaves a span in `lane`."""
        begins = self.now(stream) if earliest is None else max(earliest, self.now(stream))
        if node is not None and seconds:
            self.spans.append(Span(node, lane or stream, begins, seconds))
        self._ready[stream] = begins + seconds
        return self._ready[stream]

    def wait(self, until: float, stream: str = COMPUTE) -> None:
        """Let a stream stand still until then."""
        self._ready[stream] = max(self.now(stream), until)

    def end(self) -> float:
        """When all streams are done."""
        return max(0.0, *self._ready.values())

    def busy(self) -> dict[str, float]:
        """The seconds that each lane is occupied."""
        found: Counter[str] = Counter()
        for span in self.spans:
            found[span.lane] += span.seconds  # type: ignore[assignment]
        return dict(found)

"""`Remark`: what a pass could not do, and why, for people to read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Remark:
    """A chance that a pass missed."""

    made_by: str  # the pass
    node: str  # the node that it is about
    what: str  # what was missed
    why: str  # the reason
    seconds: float  # what it costs in a step
    remedy: str  # what would help

    def __str__(self) -> str:
        return f"{self.what}: {self.why}: +{self.seconds * 1e3:.3g} ms a step; {self.remedy}"

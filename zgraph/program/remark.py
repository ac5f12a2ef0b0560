"""`Remark`: what a pass would have liked to do and could not, for people to read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Remark:
    """A missed chance: the pass, the node that it is about, what was missed and why, its cost in seconds a step, and
    what would help."""

    made_by: str
    node: str
    what: str
    why: str
    seconds: float
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}: +{self.seconds * 1e3:.3g} ms a step; {self.remedy}"

"""Actions: what a rank of a pipeline does at one time, each for one stage and one micro-batch.

Their text is that of torch.distributed.pipelining's CSV files: "2F3" is the forward of stage 2 for micro-batch 3.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from zgraph.errors import PlanError

__all__ = ["Action", "Kind"]

_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")


class Kind(StrEnum):
    """What is done for a micro-batch on a stage. A backward is either one B, or an I and later a W."""

    F = "F"
    """The forward."""
    B = "B"
    """The whole backward."""
    I = "I"  # noqa: E741
    """The gradients of the stage's inputs: what the stages before it wait for."""
    W = "W"
    """The gradients of the stage's weights: what nothing but the end of the step waits for."""


@dataclass(frozen=True, order=True, slots=True)
class Action:
    """One action. Stages and micro-batches count from 0."""

    kind: Kind  # forward, backward, or a half of a backward
    stage: int  # the pipeline stage
    micro_batch: int  # the micro-batch

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that a text such as "2F3" means. Raises `PlanError`."""
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise PlanError(
                f"{text[:80]!r} is no action of a schedule",
                where="schedule",
                hint='an action is a stage, one of F, B, I and W, and a micro-batch: "2F3"',
            )
        return cls(Kind(match[2]), int(match[1]), int(match[3]))

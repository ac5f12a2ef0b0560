"""What a plan says of watching a run: how long ranks wait for each other, how often each says where it is. Nothing here imports torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from zgraph.record import Record

__all__ = ["Watch"]

SOON = 2.5  # seconds: heartbeats that are further apart tell too late of ranks that differ


class Watch(Record, frozen=True):
    """How ranks watch each other. A rank that others wait for is reported by them: where it is, or that it is gone.

    `timeout` is what a collective of the plan's mesh may take until all ranks are there: more than one rank may read data longer than
    another. While programs are compiled and checkpoints saved or loaded it does not hold. It is set on the process groups of the mesh, so
    also on a default group that is one of them. Over NCCL it is the time after which torch ends the process. Heartbeats go through the
    default group's store, from a thread.

    `vote` says when ranks compare what they are about to do. By "step" it is once a step, and where they do something for the first time: what
    follows as it did before needs no vote. Ranks that differ there find it by their heartbeats, within seconds: all raise the same error, and
    their process groups are shut. So it is only where heartbeats are at most 2.5 s apart. By "call" it is before each forward, backward and update.
    """

    timeout: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="seconds that ranks wait for each other; none: as long as the process groups do"
    )
    interval: Annotated[float, Field(ge=0, le=3600)] = Field(
        default=1.0, description="seconds from one heartbeat of a rank to the next; 0: no heartbeats"
    )
    vote: Literal["step", "call"] = Field(
        default="step",
        description="when ranks compare what they are about to do: once a step, or before each forward, backward and update",
    )

    @property
    def by_steps(self) -> bool:
        """Whether ranks vote once a step."""
        return self.vote == "step" and 0 < self.interval <= SOON

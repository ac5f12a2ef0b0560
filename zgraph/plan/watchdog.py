"""What a plan says of watching a run: how long ranks wait for each other, how often each reports its position. Nothing
here imports torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from zgraph.record import Record

__all__ = ["Watch"]

SOON = 2.5  # seconds: heartbeats that are further apart would report ranks that differ too late


class Watch(Record, frozen=True):
    """How ranks watch each other: a rank that others wait for is reported by them, with its position, or as gone.

    `timeout` is how long a collective of the plan's mesh may take until all ranks have reached it: longer than any
    rank may be behind another, reading data for example. It does not apply while programs are compiled and checkpoints
    are saved or loaded. It is set on the process groups of the mesh, so also on a default group that is one of them.
    Over NCCL it is the time after which torch ends the process. Heartbeats go through the default group's store, from
    a thread.

    `vote` says when ranks compare what they are about to do. With "step" they do it once a step, and before what they
    do for the first time: what follows as it did before needs no vote. Ranks that differ all the same find out by
    their heartbeats, within seconds: all raise the same error, and their process groups are shut down. So "step" needs
    heartbeats that are at most 2.5 s apart; with fewer, or with "call", ranks vote before each forward, backward and
    update.
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

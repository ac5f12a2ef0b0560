"""What a plan says of offloading: which values are stored in the host's memory or on disk while nothing reads them.

Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StrictInt, model_validator

from zgraph.errors import PlanError
from zgraph.plan.communication import Bytes
from zgraph.record import Record, short


def _check_place(place: str) -> str:
    kind, _, folder = place.partition(":")
    if place in ("none", "cpu", "auto"):
        return place
    if kind in ("nvme", "auto") and folder:
        return f"{kind}:{os.path.normpath(folder)}"
    hint = '"none", "cpu" (the host\'s memory), "nvme:FOLDER", "auto" or "auto:FOLDER"'
    raise PlanError(f"{short(place)} is no place", hint=hint)


KINDS = ("activations", "optimizer", "parameters")
Place = Annotated[str, AfterValidator(_check_place)]


class Offload(Record, frozen=True):
    """Where values are stored while the device does not need them (after ZeRO-Infinity; Rajbhandari et al., 2021).

    Each place is "none" (the device), "cpu" (the host's memory), "nvme:FOLDER" (a file), "auto" or "auto:FOLDER".
    "auto" is the device, unless a `memory_budget` needs more: then it is the host's memory, if the device has its own,
    or a file in FOLDER.
    """

    activations: Place = Field(
        default="auto", description="what the forward saves for the backward (DeepSpeed: cpu_checkpointing)"
    )
    optimizer: Place = Field(
        default="auto", description="the optimizer's states, and the gradients of parameters that the host updates"
    )
    parameters: Place = Field(default="auto", description="shards of parameters, and their gradients (zero=3)")
    ratio: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="the share of the optimizer's states that is offloaded, the largest parameters' first (DeepSpeed: twin-flow); none: all, or "
        'of "auto" what the budget needs',
    )
    update_on: Literal["host", "device"] = Field(
        default="host",
        description="where what is offloaded is updated: on the host's processors (ZeRO-Offload), or on the device, to which it is fetched",
    )
    delayed_after: Annotated[StrictInt, Field(ge=0)] | None = Field(
        default=None,
        description="CHANGES THE NUMERICS: after so many updates, those of what is offloaded run beside the next step, which computes with "
        "the weights before them (ZeRO-Offload's one-step delayed parameter update); none: never",
    )
    staging_bytes: Bytes | None = Field(
        default=None,
        description="bytes in flight each way in forward and backward; none: twice the largest value that moves",
    )
    sub_group_bytes: Bytes | None = Field(
        default=None,
        description="bytes that one part of an update brings to the device (a parameter is never split); none: a 16th of all, "
        "1 MiB at least and 256 MiB at most",
    )
    least_bytes: Bytes = Field(default=4096, description="values and parts of fewer bytes stay on the device")
    threads: Annotated[StrictInt, Field(ge=1)] = Field(default=4, description="reads and writes of a disk at once")
    checksums: bool = Field(
        default=False, description="whether what is read from a disk is compared with what was written"
    )

    @model_validator(mode="after")
    def _one_folder(self) -> Self:
        folders = self._folders()
        if len(folders) > 1:
            raise PlanError(
                f"offload names two folders: {folders[0]} and {folders[1]}",
                hint="all that goes to disk goes to one folder of it",
            )
        return self

    def placed(self, auto: Mapping[str, str]) -> Self:
        """Return this record with the places of `auto` instead of each "auto".

        `ratio` stays None where the optimizer's place was "auto" and is no longer the device: the memory budget then
        decides it.
        """
        places = {what: auto[what] if getattr(self, what).startswith("auto") else getattr(self, what) for what in KINDS}
        named = not self.optimizer.startswith("auto")
        ratio = 1.0 if self.ratio is None and (named or places["optimizer"] == "none") else self.ratio
        return self.model_copy(update={**places, "ratio": ratio})

    def same(self, other: Offload) -> bool:
        """Return whether two records mean the same, once each remaining "auto" is the device."""
        mine, theirs = (o.placed(dict.fromkeys(KINDS, "none")) for o in (self, other))
        return mine == theirs

    def tier(self, what: str) -> str | None:
        """Return "cpu" or "nvme" for "activations", "optimizer" or "parameters"; None for the device, and for "auto"."""
        kind = str(getattr(self, what)).partition(":")[0]
        return kind if kind in ("cpu", "nvme") else None

    @property
    def gradients(self) -> bool:
        """Whether gradients are offloaded as soon as they are computed, to be updated on the host."""
        return self.update_on == "host" and self.tier("optimizer") is not None

    @property
    def late(self) -> bool:
        """Whether there are updates that run beside the next step."""
        return self.delayed_after is not None and self.tier("optimizer") is not None

    def folder(self) -> str | None:
        """Return the folder on the disk, of which there is at most one, or None."""
        return next(iter(self._folders()), None)

    def tiers(self) -> list[str]:
        """Return the tiers that are used, "cpu" before "nvme"."""
        return sorted({t for t in map(self.tier, KINDS) if t is not None})

    def _folders(self) -> list[str]:
        return sorted({f for _, _, f in (getattr(self, what).partition(":") for what in KINDS) if f})

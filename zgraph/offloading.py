"""What a plan says of offloading: what lies in the host's memory or on disk while nothing computes with it.

Nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, Field, StrictInt, model_validator

from zgraph.communication import Bytes
from zgraph.errors import PlanError
from zgraph.record import Record, short


def _check_place(place: str) -> str:
    kind, _, folder = place.partition(":")
    if place in ("none", "cpu") or (kind == "nvme" and folder):
        return place
    raise PlanError(f"{short(place)} is no place", hint='"none", "cpu" (the host\'s memory) or "nvme:FOLDER"')


Place = Annotated[str, AfterValidator(_check_place)]


class Offload(Record, frozen=True):
    """Where what the device need not hold lies (after ZeRO-Infinity; Rajbhandari et al., 2021)."""

    activations: Place = Field(
        default="none", description="what the forward leaves for the backward (DeepSpeed: cpu_checkpointing)"
    )
    optimizer: Place = Field(default="none", description="the optimizer's states")
    parameters: Place = Field(default="none", description="shards of parameters, and their gradients (zero=3)")
    ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        default=1.0,
        description="the share of the optimizer's states that goes, the largest parameters' first (DeepSpeed: twin-flow)",
    )
    staging_bytes: Bytes | None = Field(
        default=None,
        description="bytes on their way each way in forward and backward; none: twice the largest value that moves",
    )
    sub_group_bytes: Bytes | None = Field(
        default=None,
        description="bytes that one part of an update brings to the device (a parameter is never parted); none: a 16th of all, "
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
                f"two folders: {folders[0]} and {folders[1]}", hint="all that goes to disk goes to one folder of it"
            )
        return self

    def tier(self, what: str) -> str | None:
        """ "cpu" or "nvme" for "activations", "optimizer" or "parameters"; None for the device."""
        place: str = getattr(self, what)
        return None if place == "none" else place.partition(":")[0]

    def folder(self) -> str | None:
        """The folder of the disk; there is one at most."""
        return next(iter(self._folders()), None)

    def tiers(self) -> list[str]:
        """Those that there are to be, "cpu" before "nvme"."""
        return sorted({p.partition(":")[0] for p in self._places() if p != "none"})

    def _folders(self) -> list[str]:
        return sorted({p.partition(":")[2] for p in self._places() if p.startswith("nvme:")})

    def _places(self) -> tuple[str, str, str]:
        return self.activations, self.optimizer, self.parameters

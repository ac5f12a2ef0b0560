"""What a plan says of communication: how large transfers are, how early they start, how much memory they may take.

Nothing here imports torch.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictInt, WithJsonSchema

from zgraph.errors import PlanError
from zgraph.record import Record, short

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(given: Any) -> Any:
    """Return "20GiB" or "512 MB" as an int of bytes, and anything but a string as it is, for the type to check.

    Raises `PlanError` for a string that is no size.
    """
    if not isinstance(given, str):
        return given
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", given)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise PlanError(f"{short(given)} is no size", hint='an int of bytes, or a number and a unit: "20GiB", "512MB"')
    return int(float(match[1]) * unit)


Bytes = Annotated[
    StrictInt,
    Field(ge=0),
    BeforeValidator(parse_bytes),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]}),
]


class Bucket(Record, frozen=True):
    """How much one transfer carries, in bytes of whole parameters and gradients. A bucket never spans two layers.

    None: as many bytes as it takes for the link's latency to be 5% of the transfer. 0: each tensor by itself.
    """

    gather: Bytes | None = Field(default=None, description="bytes that a bucket of gathers grows to")
    reduce: Bytes | None = Field(default=None, description="bytes that a bucket of reductions grows to")


class Prefetch(Record, frozen=True):
    """How early gathers start, and how much memory they may take."""

    enabled: bool = Field(default=True, description="false: each collective is waited for where it starts")
    max_bytes: Bytes | None = Field(
        default=None,
        description="the most gathered bytes at any time; none: what the program needs at once, and two of its largest layers",
    )
    spare_bytes: Bytes | None = Field(
        default=None,
        description="bytes by which gathers that arrive early may raise the step's peak; none: those of the largest layer (a "
        "bucket of middle size at least), and no bound beside max_bytes",
    )
    ahead_bytes: Bytes | None = Field(
        default=None, description="of these, bytes gathered that nothing has used yet; none: no bound of its own"
    )
    reduce_bytes: Bytes | None = Field(
        default=None,
        description="bytes of gradients that wait to be scattered; none: two of the largest layers, where that raises no peak",
    )
    reuse_bytes: Bytes | None = Field(
        default=None,
        description="a weight is not gathered again for the backward if no more bytes of others than this are used between; "
        "none: 1% of the largest layer",
    )
    across_steps: bool = Field(
        default=True, description="whether an update starts the first gathers of the next forward"
    )

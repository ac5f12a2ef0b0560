"""What scripts import from DeepSpeed's `partition_parameters`.

`ZeroParamStatus` is there for scripts that ask a parameter for its `ds_status` where it has one: parameters have none here.
"""

from __future__ import annotations

from enum import Enum

from zgraph.deepspeed.zero import GatheredParameters, Init, register_external_parameter, unregister_external_parameter

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "register_external_parameter",
    "unregister_external_parameter",
]


class ZeroParamStatus(Enum):
    """DeepSpeed's states of a parameter that is sharded."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3

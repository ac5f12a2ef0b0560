"""What scripts import from DeepSpeed's `partition_parameters`."""

from __future__ import annotations

from zgraph.deepspeed.zero import (
    DeepSpeedTensorOverride,
    GatheredParameters,
    Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    restore_init_context,
    shutdown_init_context,
    unregister_external_parameter,
)

__all__ = [
    "DeepSpeedTensorOverride",
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "register_external_parameter",
    "restore_init_context",
    "shutdown_init_context",
    "unregister_external_parameter",
]

"""DeepSpeed's `runtime.zero`, where scripts import its helpers from."""

from zgraph.deepspeed.zero import (
    DeepSpeedTensorOverride,
    DeepSpeedZeRoOffload,
    GatheredParameters,
    Init,
    TiledLinear,
    TiledLinearReturnBias,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unwrap_model_for_generation,
)

__all__ = [
    "DeepSpeedTensorOverride",
    "DeepSpeedZeRoOffload",
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "ZeroParamType",
    "register_external_parameter",
    "unwrap_model_for_generation",
]

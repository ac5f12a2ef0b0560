"""The numbers of ZeRO's stages by DeepSpeed's names, and its classes of a configuration, which are refused: a configuration is a plan here."""

from enum import IntEnum

from zgraph.deepspeed.absent_names import absent

__all__ = ["DeepSpeedZeroConfig", "ZeroStageEnum", "get_zero_config", "read_zero_config_deprecated"]


class ZeroStageEnum(IntEnum):
    """ZeRO's stages, by what is sharded."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


_PLAN = (
    "a configuration is a plan here",
    "zgraph.deepspeed.plan(config, world=N) gives the plan and the report on the configuration",
)
_ABSENT = absent(
    "runtime.zero.config",
    dict.fromkeys(("DeepSpeedZeroConfig", "get_zero_config", "read_zero_config_deprecated"), _PLAN),
)
DeepSpeedZeroConfig, get_zero_config = _ABSENT["DeepSpeedZeroConfig"], _ABSENT["get_zero_config"]
read_zero_config_deprecated = _ABSENT["read_zero_config_deprecated"]

"""The numbers of ZeRO's stages by DeepSpeed's names, and its classes of a configuration, which are refused: a configuration is a plan here."""

from enum import IntEnum

from zgraph.deepspeed.absent_names import Absent

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
DeepSpeedZeroConfig = Absent("runtime.zero.config.DeepSpeedZeroConfig", *_PLAN)
get_zero_config = Absent("runtime.zero.config.get_zero_config", *_PLAN)
read_zero_config_deprecated = Absent("runtime.zero.config.read_zero_config_deprecated", *_PLAN)

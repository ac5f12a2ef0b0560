"""Where DeepSpeed stores what is offloaded, by its names, and its classes of a configuration, which are refused: a configuration is a plan here."""

from enum import StrEnum

from zgraph.deepspeed.absent_names import Absent

__all__ = [
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
]


class OffloadDeviceEnum(StrEnum):
    """Where something is stored."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """What `engine.offload_states`, which is refused, would move."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


_PLAN = (
    "a configuration is a plan here",
    "`offload` of a plan, or the sections offload_optimizer and offload_param of the configuration",
)
DeepSpeedZeroOffloadOptimizerConfig = Absent("runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig", *_PLAN)
DeepSpeedZeroOffloadParamConfig = Absent("runtime.zero.offload_config.DeepSpeedZeroOffloadParamConfig", *_PLAN)

"""DeepSpeed's Lion."""

from zgraph.deepspeed.ops.base import BaseOptimizer
from zgraph.deepspeed.parameter_groups import register
from zgraph.plan.optimizers import Lion


class FusedLion(BaseOptimizer):
    """DeepSpeed's FusedLion, with its arguments in its order."""

    DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0, "set_grad_none": True}  # noqa: RUF012


class DeepSpeedCPULion(BaseOptimizer):
    """`FusedLion` under the name that is used with offloading."""

    DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0, "fp32_optimizer_states": True}  # noqa: RUF012


for _kind in (FusedLion, DeepSpeedCPULion):
    register(_kind, Lion)

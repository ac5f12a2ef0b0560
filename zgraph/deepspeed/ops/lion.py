"""DeepSpeed's Lion."""

from zgraph.deepspeed.ops.base import BaseOptimizer
from zgraph.deepspeed.parameter_groups import register
from zgraph.plan.optimizers import Lion


class FusedLion(BaseOptimizer):
    """`FusedLion(params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0)`."""

    DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0}  # noqa: RUF012


class DeepSpeedCPULion(FusedLion):
    """`FusedLion` under the name that is used with offloading."""


for _kind in (FusedLion, DeepSpeedCPULion):
    register(_kind, Lion)

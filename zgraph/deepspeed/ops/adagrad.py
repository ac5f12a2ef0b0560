"""DeepSpeed's Adagrad for offloading."""

from zgraph.deepspeed.ops.base import BaseOptimizer
from zgraph.deepspeed.parameter_groups import register
from zgraph.plan.optimizers import Adagrad


class DeepSpeedCPUAdagrad(BaseOptimizer):
    """`DeepSpeedCPUAdagrad(params, lr=1e-2, eps=1e-10, weight_decay=0.0)`."""

    DEFAULTS = {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}  # noqa: RUF012


register(DeepSpeedCPUAdagrad, Adagrad)

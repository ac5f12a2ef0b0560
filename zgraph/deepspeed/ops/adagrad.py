"""DeepSpeed's Adagrad for offloading."""

from zgraph.deepspeed.ops.base import BaseOptimizer
from zgraph.deepspeed.parameter_groups import register
from zgraph.plan.optimizers import Adagrad


class DeepSpeedCPUAdagrad(BaseOptimizer):
    """DeepSpeed's Adagrad, with its arguments in its order."""

    DEFAULTS = {  # noqa: RUF012
        "lr": 1e-2,
        "eps": 1e-10,
        "weight_decay": 0.0,
        "amsgrad": False,
        "fp32_optimizer_states": True,
    }


register(DeepSpeedCPUAdagrad, Adagrad)

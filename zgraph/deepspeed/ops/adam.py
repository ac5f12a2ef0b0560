"""DeepSpeed's Adam: with decoupled weight decay (AdamW) unless `adam_w_mode` is False, and without weight decay unless it is given."""

from __future__ import annotations

from typing import Any

from zgraph.deepspeed.ops.base import BaseOptimizer
from zgraph.deepspeed.parameter_groups import register
from zgraph.errors import PlanError
from zgraph.plan.optimizers import Adam


class FusedAdam(BaseOptimizer):
    """DeepSpeed's FusedAdam, with its arguments in its order."""

    DEFAULTS = {  # noqa: RUF012
        "lr": 1e-3,
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "adam_w_mode": True,
        "weight_decay": 0.0,
        "amsgrad": False,
        "set_grad_none": True,
    }

    def __init__(self, params: Any, *values: Any, **named: Any) -> None:
        super().__init__(params, *values, **named)
        for group in self.param_groups:
            if not group.pop("bias_correction", True):
                raise PlanError(
                    f"{type(self).__name__} does not support bias_correction=False",
                    where="bias_correction",
                    why="a plan's Adam corrects its averages for beginning with zero",
                    hint="leave it out",
                )
            group["decoupled_weight_decay"] = group.pop("adam_w_mode", group.pop("adamw_mode", True))


class DeepSpeedCPUAdam(FusedAdam):
    """`FusedAdam` under the name that is used with offloading, with its own order of arguments."""

    DEFAULTS = {  # noqa: RUF012
        "lr": 1e-3,
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "amsgrad": False,
        "adamw_mode": True,
        "fp32_optimizer_states": True,
    }


for _kind in (FusedAdam, DeepSpeedCPUAdam):
    register(_kind, Adam)

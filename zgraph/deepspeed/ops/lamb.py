"""DeepSpeed's LAMB."""

from zgraph.deepspeed.ops.base import BaseOptimizer
from zgraph.deepspeed.parameter_groups import register
from zgraph.plan.optimizers import LAMB


class FusedLamb(BaseOptimizer):
    """DeepSpeed's FusedLamb, with its arguments in its order."""

    DEFAULTS = {  # noqa: RUF012
        "lr": 1e-3,
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "eps_inside_sqrt": False,
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
        "max_coeff": 10.0,
        "min_coeff": 0.01,
        "amsgrad": False,
    }


register(FusedLamb, LAMB)

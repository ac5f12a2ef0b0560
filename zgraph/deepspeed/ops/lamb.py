"""DeepSpeed's LAMB."""

from zgraph.deepspeed.ops.base import BaseOptimizer
from zgraph.deepspeed.parameter_groups import register
from zgraph.plan.optimizers import LAMB


class FusedLamb(BaseOptimizer):
    """`FusedLamb(params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, max_coeff=10.0, min_coeff=0.01)`."""

    DEFAULTS = {  # noqa: RUF012
        "lr": 1e-3,
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.0,
        "max_coeff": 10.0,
        "min_coeff": 0.01,
    }


register(FusedLamb, LAMB)

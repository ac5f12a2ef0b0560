"""What scripts import from DeepSpeed's `stage_1_and_2`: estimates, and the optimizer's class."""

from zgraph.deepspeed.absent_names import absent
from zgraph.deepspeed.memory_estimates import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)
from zgraph.deepspeed.optimizer_kinds import DeepSpeedZeroOptimizer

estimate_zero2_model_states_mem_needs = absent(
    "runtime.zero.stage_1_and_2",
    {
        "estimate_zero2_model_states_mem_needs": (
            "what is stored depends on the model's parameters, not on their number alone",
            "estimate_zero2_model_states_mem_needs_all_live(model), …_all_cold(…); zgraph.forecast",
        )
    },
)["estimate_zero2_model_states_mem_needs"]

__all__ = [
    "DeepSpeedZeroOptimizer",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]

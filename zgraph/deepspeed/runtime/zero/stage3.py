"""What scripts import from DeepSpeed's `stage3`: estimates, the optimizer's class, whole weights for `generate`."""

from zgraph.deepspeed.absent_names import absent
from zgraph.deepspeed.memory_estimates import (
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from zgraph.deepspeed.optimizer_kinds import DeepSpeedZeroOptimizer_Stage3
from zgraph.deepspeed.zero import unwrap_model_for_generation

estimate_zero3_model_states_mem_needs = absent(
    "runtime.zero.stage3",
    {
        "estimate_zero3_model_states_mem_needs": (
            "what is stored depends on the model's parameters, not on their number alone",
            "estimate_zero3_model_states_mem_needs_all_live(model), …_all_cold(…); zgraph.forecast",
        )
    },
)["estimate_zero3_model_states_mem_needs"]

__all__ = [
    "DeepSpeedZeroOptimizer_Stage3",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "unwrap_model_for_generation",
]

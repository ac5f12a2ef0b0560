"""What scripts import from DeepSpeed's `stage3`: estimates, the optimizer's class, whole weights for `generate`."""

from zgraph.deepspeed.memory_estimates import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from zgraph.deepspeed.optimizer_kinds import DeepSpeedZeroOptimizer_Stage3
from zgraph.deepspeed.zero import unwrap_model_for_generation

__all__ = [
    "DeepSpeedZeroOptimizer_Stage3",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "unwrap_model_for_generation",
]

"""What scripts import from DeepSpeed's `stage_1_and_2`: estimates, and the optimizer's class."""

from zgraph.deepspeed.memory_estimates import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)
from zgraph.deepspeed.optimizer_kinds import DeepSpeedZeroOptimizer

__all__ = [
    "DeepSpeedZeroOptimizer",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]

"""DeepSpeed's `flops_profiler`, where scripts import it from."""

from zgraph.deepspeed.profiling.flops_profiler.profiler import FlopsProfiler, get_model_profile

__all__ = ["FlopsProfiler", "get_model_profile"]

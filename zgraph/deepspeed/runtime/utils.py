"""DeepSpeed's helpers, where scripts import them from."""

from zgraph.deepspeed.utils.memory import memory_status, see_memory_usage

__all__ = ["memory_status", "see_memory_usage"]

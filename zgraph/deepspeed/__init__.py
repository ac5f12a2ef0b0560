"""DeepSpeed's sections of a configuration as fields of a plan."""

from zgraph.deepspeed.config import communication, elastic, offloading, publishing

__all__ = ["communication", "elastic", "offloading", "publishing"]

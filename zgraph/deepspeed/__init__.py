"""DeepSpeed's configuration as a plan, and its sections as fields of one."""

from zgraph.deepspeed.config import communication, elastic, offloading, publishing
from zgraph.deepspeed.translate import plan, report, usual_world

__all__ = ["communication", "elastic", "offloading", "plan", "publishing", "report", "usual_world"]

"""All that a user writes: the plan and the records in it. Loads without torch."""

from zgraph.plan.plan import Plan

__all__ = ["Plan"]

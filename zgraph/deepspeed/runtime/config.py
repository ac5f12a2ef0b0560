"""The error for a configuration that zgraph does not support, under DeepSpeed's name."""

from zgraph.errors import PlanError

DeepSpeedConfigError = PlanError

__all__ = ["DeepSpeedConfigError"]

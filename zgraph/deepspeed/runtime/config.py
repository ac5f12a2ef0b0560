"""The error of a configuration that can't be had, where scripts import it from."""

from zgraph.errors import PlanError

DeepSpeedConfigError = PlanError

__all__ = ["DeepSpeedConfigError"]

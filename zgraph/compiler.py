"""`programs` by the name that documents gave it before: `zgraph.programs` is the same."""

from zgraph.build.planned_step import programs

__all__ = ["programs"]

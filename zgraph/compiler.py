"""An older name of `zgraph.programs`, which documents used."""

from zgraph.build.planned_step import programs

__all__ = ["programs"]

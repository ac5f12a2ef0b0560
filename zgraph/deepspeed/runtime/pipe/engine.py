"""The engine of a pipeline, where scripts import it from."""

from zgraph.deepspeed.pipe.engine import PipelineEngine

__all__ = ["PipelineEngine"]

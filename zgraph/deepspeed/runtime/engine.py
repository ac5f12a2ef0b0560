"""DeepSpeed's engine, where scripts import it from."""

from zgraph.deepspeed.engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]

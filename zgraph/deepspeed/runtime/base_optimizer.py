"""DeepSpeed's module of this name: the classes of an engine's optimizer."""

from zgraph.deepspeed.engine_optimizer import EngineOptimizer

DeepSpeedOptimizer = EngineOptimizer
ZeROOptimizer = EngineOptimizer

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]

"""DeepSpeed's module of this name: what an engine's optimizer is an instance of."""

from zgraph.deepspeed.engine_optimizer import EngineOptimizer

DeepSpeedOptimizer = EngineOptimizer
ZeROOptimizer = EngineOptimizer

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]

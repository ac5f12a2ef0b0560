"""DeepSpeed's classes of ZeRO optimizers, for scripts that ask `isinstance(engine.optimizer, …)`."""

from __future__ import annotations

from typing import Any, NoReturn

from zgraph.deepspeed.engine_optimizer import EngineOptimizer
from zgraph.errors import UnsupportedError


class _OfStages(type):
    """The type of a class whose instances are the optimizers of engines at some ZeRO stages."""

    stages: tuple[int, ...] = ()

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, EngineOptimizer) and instance.zero_stage in cls.stages

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(
            f"deepspeed's {cls.__name__} can't be made by a script",
            why="an engine's optimizer is a compiled update",
            hint='initialize(…) with "zero_optimization": {"stage": 3}',
        )


class DeepSpeedZeroOptimizer(metaclass=_OfStages):
    """The optimizers of engines at ZeRO stages 1 and 2."""

    stages = (1, 2)


class DeepSpeedZeroOptimizer_Stage3(metaclass=_OfStages):
    """The optimizers of engines at ZeRO stage 3."""

    stages = (3,)

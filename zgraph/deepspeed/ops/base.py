"""The base class of optimizers that an engine runs, and that do not step by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from zgraph.deepspeed.ops.arguments import by_name
from zgraph.errors import PlanError, StepError

_WITHOUT_EFFECT = ("set_grad_none",)  # an argument that does not change the result of an update
_ONLY = {  # arguments that can only have DeepSpeed's own value: (why, what to do)
    "fp32_optimizer_states": (
        "states are float32, unless a plan says otherwise",
        "`optimizer_state` of the plan's precision",
    ),
    "eps_inside_sqrt": ("the plan's LAMB adds eps to the square root", "leave it out"),
    "max_grad_norm": (
        "the plan clips the gradients of all groups together",
        '"gradient_clipping" in the configuration',
    ),
}


class BaseOptimizer(torch.optim.Optimizer):
    """Parameter groups with their numbers, for `initialize`. `DEFAULTS` are the arguments and their values in DeepSpeed,
    in DeepSpeed's order."""

    DEFAULTS: dict[str, Any] = {}  # noqa: RUF012 (each class has its own)

    def __init__(self, params: Any, *values: Any, **named: Any) -> None:
        given = by_name(type(self).__name__, "params", self.DEFAULTS, values, named)
        for name, value in given.items():
            if name in _ONLY and value != self.DEFAULTS[name]:
                why, hint = _ONLY[name]
                raise PlanError(
                    f"{type(self).__name__} does not support {name}={value!r}", where=name, why=why, hint=hint
                )
        numbers = {**self.DEFAULTS, **given}
        super().__init__(params, {k: v for k, v in numbers.items() if k not in _ONLY and k not in _WITHOUT_EFFECT})

    def step(self, closure: Callable[[], Any] | None = None) -> NoReturn:  # type: ignore[override]
        """Raise `StepError`: an engine runs the steps."""
        raise StepError(
            f"{type(self).__name__} makes no step by itself",
            why="it has the numbers of a compiled update, which an engine runs",
            hint="give it to initialize(optimizer=…), and call engine.step()",
        )

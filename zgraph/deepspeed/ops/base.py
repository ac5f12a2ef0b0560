"""The base class of optimizers that an engine runs, and that do not step by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from zgraph.errors import PlanError, StepError
from zgraph.names import did_you_mean


class BaseOptimizer(torch.optim.Optimizer):
    """Parameter groups with their numbers, for `initialize`. `DEFAULTS` are the numbers that a group may have, in
    DeepSpeed's order; `HOW` are arguments that do not change the result of an update."""

    DEFAULTS: dict[str, Any] = {}  # noqa: RUF012 (each class has its own)
    HOW: tuple[str, ...] = ("set_grad_none", "fp32_optimizer_states")

    def __init__(self, params: Any, *values: Any, **named: Any) -> None:
        known = list(self.DEFAULTS)
        if len(values) > len(known):
            raise PlanError(f"{type(self).__name__} takes {len(known)} numbers", hint=", ".join(known))
        given = dict(zip(known, values, strict=False)) | named
        for name in given.keys() - {*known, *self.HOW}:
            raise PlanError(
                f"{type(self).__name__} has no argument {name!r}", where=name, hint=did_you_mean(name, known)
            )
        super().__init__(params, {**self.DEFAULTS, **{k: v for k, v in given.items() if k not in self.HOW}})

    def step(self, closure: Callable[[], Any] | None = None) -> NoReturn:  # type: ignore[override]
        """Raise `StepError`: an engine runs the steps."""
        raise StepError(
            f"{type(self).__name__} makes no step by itself",
            why="it has the numbers of a compiled update, which an engine runs",
            hint="give it to initialize(optimizer=…), and call engine.step()",
        )

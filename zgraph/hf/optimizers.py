"""The optimizer that a Trainer would make for its plain model, as a plan's."""

from __future__ import annotations

import inspect
from typing import Any

from zgraph.deepspeed.parameter_groups import names_of, record_of
from zgraph.errors import PlanError
from zgraph.plan.optimizers import Optimizer


def optimizer_of(trainer: Any) -> Optimizer:
    """The record of `trainer.optimizer`, or of what `create_optimizer` makes, with its groups. The trainer is left without one.

    Raises `PlanError` for a class that a plan has not, `ModelError` for parameters that are not the model's, `StepError` for an optimizer that has
    made steps."""
    given = trainer.optimizer
    made = given if given is not None else _created(trainer)
    record = record_of(made, names_of(trainer.model, made.param_groups))
    if record is None:
        trainer.optimizer = given
        raise PlanError(
            f"a plan has no {type(made).__name__}",
            where="optim of TrainingArguments" if given is None else "optimizers of the Trainer",
            why="its update would have to be compiled, and its states divided over the ranks",
            hint='optim="adamw_torch", "sgd" or "adagrad"; or train without attach',
        )
    trainer.optimizer = None
    return record


def _created(trainer: Any) -> Any:
    if "model" in inspect.signature(trainer.create_optimizer).parameters:
        trainer.create_optimizer(trainer.model)
    else:
        trainer.create_optimizer()
    return trainer.optimizer

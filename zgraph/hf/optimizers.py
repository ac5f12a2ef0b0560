"""The optimizer that a Trainer would make for its plain model, as a plan's."""

from __future__ import annotations

from typing import Any

from zgraph.deepspeed.parameter_groups import names_of, record_of
from zgraph.errors import PlanError
from zgraph.plan.optimizers import Optimizer


def optimizer_of(trainer: Any) -> tuple[Optimizer, bool]:
    """(the record of `trainer.optimizer`, or of what `create_optimizer` makes, with its groups; whether it decides itself that a step with fp16's
    overflow is skipped, as torch's fused ones do). The trainer is left as it was.

    Raises `PlanError` for a class that a plan has not, `ModelError` for parameters that are not the model's, `StepError` for an optimizer that has
    made steps."""
    given = trainer.optimizer
    try:
        if given is None:
            trainer.create_optimizer()
        made = trainer.optimizer
    finally:
        trainer.optimizer = given
    record = record_of(made, names_of(trainer.model, made.param_groups))
    if record is None:
        raise PlanError(
            f"a plan has no {type(made).__name__}",
            where="optim of TrainingArguments" if given is None else "optimizers of the Trainer",
            why="its update would have to be compiled, and its states divided over the ranks",
            hint='optim="adamw_torch", "sgd" or "adagrad"; or train without attach',
        )
    return record, bool(getattr(made, "_step_supports_amp_scaling", False))

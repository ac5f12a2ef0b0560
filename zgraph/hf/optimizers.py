"""The optimizer that a Trainer would make for its plain model, as a plan's record."""

from __future__ import annotations

from typing import Any, NamedTuple

from zgraph.api.gathered_weights import handle_of
from zgraph.deepspeed.parameter_groups import names_of, record_of
from zgraph.errors import ModelError, PlanError
from zgraph.plan.optimizers import Optimizer


class Made(NamedTuple):
    """The optimizer that a Trainer has or would make."""

    record: Optimizer  # the plan's record of it
    decides: bool  # it skips a step with fp16's overflow by itself, as torch's fused optimizers do
    without: list[str]  # the model's parameters that it does not have


def optimizer_of(trainer: Any) -> Made:
    """Return the record of `trainer.optimizer`, or of what `create_optimizer` makes, with its groups. The trainer stays
    unchanged.

    Raises `PlanError` for a class that plans do not support, `ModelError` for parameters that are not the model's,
    `StepError` for an optimizer that has made steps.
    """
    given = trainer.optimizer
    try:
        if given is None:
            trainer.create_optimizer()
        optimizer = trainer.optimizer
    finally:
        trainer.optimizer = given
    names = names_of(trainer.model, optimizer.param_groups)
    record = record_of(optimizer, names)
    if record is None:
        raise PlanError(
            f"a plan has no {type(optimizer).__name__}",
            where="optim of TrainingArguments" if given is None else "optimizers of the Trainer",
            why="its update would have to be compiled, and its states divided over the ranks",
            hint='optim="adamw_torch", "sgd" or "adagrad"; or train without attach',
        )
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    without = [n for n, p in trainer.model.named_parameters() if id(p) not in owned]
    return Made(record, bool(getattr(optimizer, "_step_supports_amp_scaling", False)), without)


def refuse_unfrozen(model: Any, without: list[str]) -> None:
    """Raise `ModelError` if a parameter that the Trainer's optimizer does not have is trained by now.

    A parameter that another has replaced is looked at once the model has run with the other.
    """
    if not without:
        return
    handle = handle_of(model)
    # (a walk through 440 parameters takes 0.5 ms, 40 times as long; the runtime made one for the last step)
    params = dict(model.named_parameters()) if handle.deferred is not None else handle.runtime.shards.params()
    freed = [n for n in without if n in params and params[n].requires_grad]
    if freed:
        raise ModelError(
            f"{freed[0]} is trained now, and was frozen when the Trainer made its optimizer",
            why="a Trainer's optimizer has the parameters that were trained when it was made, and leaves others as they are",
            hint="let it require gradients when attach is called (freeze it after that); or give the Trainer an optimizer with it",
        )


def refuse_all_frozen(model: Any) -> None:
    """Raise `ModelError` if no parameter of a model's is to be trained."""
    if not any(p.requires_grad for p in model.parameters()):
        raise ModelError(
            "no parameter of the trainer's model trains",
            why="all are frozen, and the loss has no gradient",
            hint="requires_grad_() on those that are to train, before attach; of an adapter is_trainable=True, or no inference_mode",
        )

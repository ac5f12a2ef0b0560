"""`attach`: makes a Trainer, built for a plain model, train it by a plan."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from os import PathLike
from typing import Any, Literal, TypeVar

import torch

from zgraph.api.compiler import compile
from zgraph.hf.arguments import notes_on, refuse_arguments, refuse_trainer
from zgraph.hf.backbones import with_backbone_in_forward
from zgraph.hf.loss_scaling import PlanScaler, loss_scale_of
from zgraph.hf.optimizers import optimizer_of
from zgraph.hf.plans import plan_of
from zgraph.hf.trainer import attached_class
from zgraph.plan.plan import Plan
from zgraph.plan.precision import Precision
from zgraph.plan.shapes import Size
from zgraph.torch_compat.private_names import refuse_release

logger = logging.getLogger(__name__)

T = TypeVar("T")


def attach(
    trainer: T,
    plan: Plan | str | PathLike[str] | Mapping[str, Any] | None = None,
    *,
    dynamic: Mapping[str, Mapping[int, str | Size] | Literal["value"]] | None = None,
) -> T:
    """Make a `Trainer` of transformers, or of a subclass, train its model by a plan; return the trainer.

    `plan`: a `Plan` (or a dict of its fields), the path of a plan's file, or a DeepSpeed configuration (a dict, or the path of a
    JSON file) whose "auto" is filled by the trainer's arguments, as in transformers; without it that of
    `zgraph.hf.TrainingArguments`. The model is compiled in place, with the sizes of `dynamic` (see
    `zgraph.compile`). Each rank has rows of its own, as with DistributedDataParallel, and results are the same.

    The optimizer is the one that the Trainer would make (its class, groups, learning rate), run by the plan: its states are
    sharded, and its update is compiled. Clipping, accumulation, the scheduler (unless a DeepSpeed configuration has one), logs and callbacks are the
    Trainer's own.
    `bf16=True` and `fp16=True` are autocast, as in the Trainer, the latter with its loss scaling, unless the plan has a
    `precision`. Checkpoints have the weights as `from_pretrained` reads them and, in the folder `zgraph`, everything that a
    run needs to continue, on any number of ranks.

    Call it on every rank, before `train()` or `evaluate()`. Raises `PlanError` for arguments and plans that clash, and
    `ModelError` for a trainer or a model that can't be attached; then nothing was changed.
    """
    refuse_trainer(trainer)
    refuse_arguments(trainer)
    translated = optimizer_of(trainer)
    chosen, scheduler_section = plan_of(trainer, plan, translated.record)
    notes = notes_on(trainer, chosen)
    args: Any = trainer.args  # type: ignore[attr-defined]
    autocast = None
    if chosen.precision == Plan().precision:
        autocast = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    if autocast is torch.float16:
        refuse_release("loss scaling")
        scale = loss_scale_of(trainer.accelerator.scaler)  # type: ignore[attr-defined]
        chosen = chosen.model_copy(update={"precision": Precision(loss_scale=scale)})
    with with_backbone_in_forward(trainer):
        compile(trainer.model, chosen, dynamic=dynamic)  # type: ignore[attr-defined]
    kind: Any = type(trainer)
    trainer.__class__ = attached_class(kind)
    trainer.after_attach(autocast, translated.without, scheduler_section)  # type: ignore[attr-defined]
    scaler = PlanScaler(trainer, told=not translated.decides) if autocast is torch.float16 else None
    trainer.accelerator.scaler = scaler  # type: ignore[attr-defined]
    args.attached_by_zgraph = True
    for note in notes:
        logger.info("%s", note)
    return trainer

"""The plan that `attach` is given: a plan, its file, or a DeepSpeed configuration."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from zgraph import deepspeed
from zgraph.deepspeed.read_config import FROM_ARGUMENTS
from zgraph.errors import PlanError, refuse_unless
from zgraph.hf.schedules import check_schedule, refuse_difference
from zgraph.plan import planfile
from zgraph.plan.clipping_and_ema import GradClip
from zgraph.plan.optimizers import Optimizer
from zgraph.plan.plan import Plan

Given = Plan | str | PathLike[str] | Mapping[str, Any]

# Fields of a plan that the Trainer's own arguments set, with these arguments.
_BY_ARGUMENTS = {
    "optimizer": "optim, learning_rate, weight_decay",
    "lr_schedule": "lr_scheduler_type, warmup_steps",
    "grad_clip": "max_grad_norm",
    "micro_batches": "gradient_accumulation_steps",
    "loss_average": "average_tokens_across_devices",
    "elastic": "per_device_train_batch_size, gradient_accumulation_steps",
}

_FIELDS = Plan.model_fields.keys()


class Wanted(NamedTuple):
    """What a Trainer is to train by."""

    plan: Plan  # the plan
    scheduler: Mapping[str, Any] | None = (
        None  # the section of a DeepSpeed configuration; None: the arguments' scheduler
    )


def plan_of(trainer: Any, given: Given | None, optimizer: Optimizer) -> Wanted:
    """Return the plan for a Trainer, with the Trainer's optimizer, and its scheduler. Without `given` it is that of the Trainer's arguments.

    Raises `PlanError` for a file that can't be read, for fields that say other than the Trainer's arguments, for a mesh whose
    ranks share rows, and if there are two plans, or none.
    """
    wanted = _read(trainer, _only(given, getattr(trainer.args, "plan", None)), optimizer)
    usual = Plan()
    plan = wanted.plan.model_copy(
        update={**{name: getattr(usual, name) for name in _BY_ARGUMENTS}, "optimizer": optimizer}
    )
    world = dist.get_world_size() if dist.is_initialized() else 1
    for name, size in plan.resolve_mesh(world).items():
        if name not in ("dp", "replicate") and size > 1:
            raise PlanError(
                f"a Trainer can't train over mesh dimension {name!r}",
                where=f"mesh.{name}",
                why="it gives each rank rows of its own, and computes its loss outside of the model"
                if name == "pp"
                else "it gives each rank rows of its own, and these ranks would need the same",
                hint="dp and replicate; or model.train_step in a loop of your own",
            )
    return wanted._replace(plan=plan)


def _only(given: Given | None, of_arguments: Given | None) -> Given:
    if given is not None and of_arguments is not None and given != of_arguments:
        raise PlanError(
            "there are two plans: that of TrainingArguments, and one beside it",
            where="plan",
            hint="leave one of them out",
        )
    plan = of_arguments if given is None else given
    refuse_unless(
        plan is None or isinstance(plan, Plan | str | PathLike | Mapping),
        "the plan of a Trainer",
        plan,
        "a zgraph.Plan, a dict, or the path of a file",
        hint="zgraph.hf.attach(trainer, zgraph.Plan(zero=3))",
    )
    if plan is None:
        raise PlanError("there is no plan", hint="zgraph.hf.attach(trainer, zgraph.Plan(zero=3)), or a plan's file")
    return plan


def _read(trainer: Any, given: Given, optimizer: Optimizer) -> Wanted:
    """Return a plan in which nothing says other than the Trainer's arguments. Data and files have the Trainer's optimizer
    beside them, for those fields that a plan has only with one."""
    if isinstance(given, Plan):
        return _agrees(trainer, given, optimizer)
    beside = {"optimizer": optimizer}
    if isinstance(given, Mapping):
        if given.keys() <= _FIELDS:
            return _agrees(trainer, Plan.model_validate({**beside, **given}), optimizer)
        return _of_deepspeed(trainer, given)
    path = Path(given)
    if path.suffix == ".json" and not (data := planfile.parse(planfile.read(path), path)).keys() <= _FIELDS:
        return _of_deepspeed(trainer, data)
    return _agrees(trainer, Plan.load(path, beside), optimizer)


def _agrees(trainer: Any, plan: Plan, optimizer: Optimizer) -> Wanted:
    """Return a plan, unless it says other than the Trainer's arguments. Raises `PlanError`."""
    usual, args = Plan(), trainer.args
    clip = GradClip(norm=args.max_grad_norm) if args.max_grad_norm else None
    same = {"micro_batches": args.gradient_accumulation_steps, "grad_clip": clip, "optimizer": optimizer}
    for field, arguments in _BY_ARGUMENTS.items():
        value = getattr(plan, field)
        if value != getattr(usual, field) and value != same.get(field):
            raise PlanError(
                f"the plan of a Trainer has no {field}",
                where=field,
                why=f"the Trainer's arguments say it: {arguments}",
                hint="leave it out of the plan"
                + ("; what needs one beside it goes into a dict or a file" if field == "optimizer" else ""),
            )
    return Wanted(plan)


def _of_deepspeed(trainer: Any, config: Mapping[str, Any]) -> Wanted:
    """Return the plan of a DeepSpeed configuration.

    As in transformers, the configuration's values of what the Trainer's arguments say must equal these. Raises `PlanError`.
    """
    section = config.get("scheduler")
    if section is not None:
        check_schedule(section, trainer.args)
    for key, argument in FROM_ARGUMENTS.items():
        said, asked = _at(config, key), getattr(trainer.args, argument)
        if said not in (None, "auto") and said != asked and not key.startswith("scheduler."):
            refuse_difference(key, said, argument, asked)
    world = dist.get_world_size() if dist.is_initialized() else 1
    # (There is an optimizer, the Trainer's: it is offloaded, and skips steps.)
    whole = {"optimizer": {"type": "AdamW"}, **{name: value for name, value in config.items() if name != "scheduler"}}
    return Wanted(deepspeed.plan(whole, world=world, model=trainer.model, arguments=trainer.args).plan, section)


def _at(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value

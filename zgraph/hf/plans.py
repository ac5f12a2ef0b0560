"""The plan that `attach` is given: a plan, its file, or a DeepSpeed configuration."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zgraph import deepspeed
from zgraph.deepspeed.read_config import FROM_ARGUMENTS
from zgraph.errors import PlanError
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
}

_FIELDS = Plan.model_fields.keys()


def plan_of(trainer: Any, given: Given | None, optimizer: Optimizer) -> Plan:
    """Return the plan for a Trainer, with the Trainer's optimizer. Without `given` it is that of the Trainer's arguments.

    Raises `PlanError` for a file that can't be read, for fields that say other than the Trainer's arguments, for a mesh whose
    ranks share rows, and if there are two plans, or none.
    """
    plan = _read(trainer, _only(given, getattr(trainer.args, "plan", None)))
    usual = Plan()
    plan = plan.model_copy(update={**{name: getattr(usual, name) for name in _BY_ARGUMENTS}, "optimizer": optimizer})
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
    return plan


def _only(given: Given | None, of_arguments: Given | None) -> Given:
    if given is not None and of_arguments is not None and given != of_arguments:
        raise PlanError(
            "there are two plans: that of TrainingArguments, and one beside it",
            where="plan",
            hint="leave one of them out",
        )
    plan = of_arguments if given is None else given
    if plan is None:
        raise PlanError("there is no plan", hint="zgraph.hf.attach(trainer, zgraph.Plan(zero=3)), or a plan's file")
    return plan


def _read(trainer: Any, given: Given) -> Plan:
    """Return a plan in which nothing says other than the Trainer's arguments."""
    if isinstance(given, Plan):
        return _agrees(trainer, given)
    if isinstance(given, Mapping):
        return _of_data(trainer, given)
    path = Path(given)
    if path.suffix == ".json" and not (data := planfile.parse(planfile.read(path), path)).keys() <= _FIELDS:
        return _of_deepspeed(trainer, data)
    return _agrees(trainer, Plan.load(path))


def _of_data(trainer: Any, data: Mapping[str, Any]) -> Plan:
    if data.keys() <= _FIELDS:
        return _agrees(trainer, Plan.model_validate(dict(data)))
    return _of_deepspeed(trainer, data)


def _agrees(trainer: Any, plan: Plan) -> Plan:
    """Raise `PlanError` if a plan says other than the Trainer's arguments; return it."""
    usual, args = Plan(), trainer.args
    clip = GradClip(norm=args.max_grad_norm) if args.max_grad_norm else None
    same = {"micro_batches": args.gradient_accumulation_steps, "grad_clip": clip}
    for field, arguments in _BY_ARGUMENTS.items():
        value = getattr(plan, field)
        if value != getattr(usual, field) and value != same.get(field):
            raise PlanError(
                f"the plan of a Trainer has no {field}",
                where=field,
                why=f"the Trainer's arguments say it: {arguments}",
                hint="leave it out of the plan",
            )
    return plan


def _of_deepspeed(trainer: Any, config: Mapping[str, Any]) -> Plan:
    """Return the plan of a DeepSpeed configuration.

    As in transformers, the configuration's values of what the Trainer's arguments say must equal these. Raises `PlanError`.
    """
    if "scheduler" in config:
        raise PlanError(
            "a Trainer can't take the scheduler of a DeepSpeed configuration",
            where="scheduler",
            why="the Trainer's lr_scheduler_type makes the one that runs",
            hint='leave it out, and say lr_scheduler_type="linear" for WarmupDecayLR, "constant_with_warmup" for WarmupLR',
        )
    for key, argument in FROM_ARGUMENTS.items():
        said, asked = _at(config, key), getattr(trainer.args, argument)
        if said not in (None, "auto") and said != asked:
            _refuse_difference(key, said, argument, asked)
    world = dist.get_world_size() if dist.is_initialized() else 1
    whole = {
        "optimizer": {"type": "AdamW"},
        **config,
    }  # (there is one, the Trainer's: it is offloaded, and skips steps)
    return deepspeed.plan(whole, world=world, model=trainer.model, arguments=trainer.args).plan


def _at(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _refuse_difference(key: str, said: Any, argument: str, asked: Any) -> None:
    raise PlanError(
        f"the DeepSpeed configuration says {said!r}, and the Trainer's {argument} is {asked!r}",
        where=key,
        why="both say the same thing, and one of them would not be done",
        hint=f'"{key}": "auto" takes the argument\'s',
    )

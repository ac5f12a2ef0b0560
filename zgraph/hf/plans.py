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
from zgraph.plan.plan import Plan

# Fields of a plan that the Trainer's own arguments set, with these arguments.
_BY_ARGUMENTS = {
    "optimizer": "optim, learning_rate, weight_decay",
    "lr_schedule": "lr_scheduler_type, warmup_steps",
    "grad_clip": "max_grad_norm",
    "micro_batches": "gradient_accumulation_steps",
    "loss_average": "average_tokens_across_devices",
}


def plan_of(trainer: Any, given: Plan | str | PathLike[str] | Mapping[str, Any]) -> Plan:
    """Return the plan for a Trainer.

    Raises `PlanError` for a file that can't be read, for fields that the Trainer's arguments set, and for a mesh whose
    ranks share rows.
    """
    plan = _read(trainer, given)
    usual = Plan()
    for field, arguments in _BY_ARGUMENTS.items():
        if getattr(plan, field) != getattr(usual, field):
            raise PlanError(
                f"the plan of a Trainer has no {field}",
                where=field,
                why=f"the Trainer's arguments say it: {arguments}",
                hint="leave it out of the plan",
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
    return plan


def _read(trainer: Any, given: Plan | str | PathLike[str] | Mapping[str, Any]) -> Plan:
    if isinstance(given, Plan):
        return given
    if isinstance(given, Mapping):
        return _of_deepspeed(trainer, given)
    path = Path(given)
    if path.suffix == ".json":
        data = planfile.parse(planfile.read(path), path)
        if not data.keys() <= Plan.model_fields.keys():
            return _of_deepspeed(trainer, data)
    return Plan.load(path)


def _of_deepspeed(trainer: Any, config: Mapping[str, Any]) -> Plan:
    """Return the plan of a configuration without the fields that the Trainer's arguments set.

    As in transformers, the configuration's values of these must equal the arguments'. Raises `PlanError`.
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
    plan = deepspeed.plan(dict(config), world=world, model=trainer.model, arguments=trainer.args).plan
    usual = Plan()
    return plan.model_copy(update={field: getattr(usual, field) for field in _BY_ARGUMENTS})


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

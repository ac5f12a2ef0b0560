"""The scheduler of a DeepSpeed configuration for a Trainer: "auto" is filled when training begins, and its number of steps is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zgraph import deepspeed
from zgraph.deepspeed.lr_schedulers import Scheduler
from zgraph.errors import PlanError
from zgraph.plan.lr_schedules import AnySchedule, TorchSchedule
from zgraph.update.torch_lr_schedulers import torch_scheduler


def scheduler_for(section: Mapping[str, Any], args: Any, steps: int, optimizer: Any) -> Any:
    """Return the scheduler of a section `scheduler` on a Trainer's optimizer, for a run of so many steps."""
    values = {
        "warmup_num_steps": ("warmup_steps", max(1, args.get_warmup_steps(steps))),
        "total_num_steps": ("number of steps", steps),
    }
    record = schedule_of(section, {"warmup_max_lr": ("learning_rate", args.learning_rate), **values})
    if isinstance(record, TorchSchedule):
        return torch_scheduler(record, optimizer)
    return Scheduler.of(record, optimizer)


def check_schedule(section: Any, args: Any) -> None:
    """Raise `PlanError` for a section that no run could have. (How many steps it has is not known yet.)"""
    rate = {"warmup_max_lr": ("learning_rate", args.learning_rate)}
    params = dict(section.get("params") or {}) if isinstance(section, Mapping) else {}
    unknown = {"warmup_num_steps": 2, "total_num_steps": 1_000_000}
    schedule_of(section, rate | {name: (name, n) for name, n in unknown.items() if params.get(name) == "auto"})


def schedule_of(section: Any, values: Mapping[str, tuple[str, Any]]) -> AnySchedule:
    """Return the schedule of a section, with "auto" filled.

    `values`: for each parameter that the Trainer's arguments say, the argument and its value. As in transformers, the
    section's own value must equal it. Raises `PlanError`.
    """
    if isinstance(section, Mapping):
        params = dict(section.get("params") or {})
        for name, (argument, value) in {"warmup_min_lr": ("", 0.0), **values}.items():
            if params.get(name) == "auto":
                params[name] = value
            elif argument and params.get(name) not in (None, value):
                refuse_difference(f"scheduler.params.{name}", params[name], argument, value)
        section = {**section, "params": params}
    config = {"scheduler": section, "optimizer": {"type": "AdamW"}}
    schedule = deepspeed.plan(config, world=1).plan.lr_schedule
    assert schedule is not None
    return schedule


def refuse_difference(key: str, said: Any, argument: str, asked: Any) -> None:
    """Raise `PlanError` for a key of a DeepSpeed configuration that says other than the Trainer's arguments."""
    raise PlanError(
        f"the DeepSpeed configuration says {said!r}, and the Trainer's {argument} is {asked!r}",
        where=key,
        why="both say the same thing, and one of them would not be done",
        hint=f'"{key}": "auto" takes the argument\'s',
    )

"""Makes any scheduler of torch's for the plan's optimizer."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import torch

from zgraph.errors import PlanError
from zgraph.plan.lr_schedules import TorchSchedule

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def torch_scheduler(record: TorchSchedule, optimizer: torch.optim.Optimizer) -> Any:
    """Return the scheduler that a plan names, made for `optimizer`; it changes the groups' numbers when stepped.

    Raises `PlanError` if there is none of that name, or if it can't be made with these arguments.
    """
    module, _, name = record.scheduler.rpartition(":")
    try:
        scheduler_class = getattr(importlib.import_module(module or "torch.optim.lr_scheduler"), name)
        scheduler = scheduler_class(optimizer, **{k: _resolved(v) for k, v in record.args.items()})
    except (ImportError, AttributeError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise PlanError(
            f"the schedule {record.scheduler!r} can't be made",
            where="lr_schedule",
            why=f"{type(error).__name__}: {error}",
            hint="a class of torch.optim.lr_scheduler, or 'package.module:Class', with its own arguments in args",
        ) from error
    kinds = inspect.Parameter
    needs = [
        p.name
        for p in inspect.signature(scheduler.step).parameters.values()
        if p.default is p.empty and p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    if needs:
        raise PlanError(
            f"the schedule {record.scheduler!r} wants {', '.join(needs)} at each step, which a plan can't give",
            where="lr_schedule",
            hint=f"make it yourself: {name}(model.zgraph.optimizer, …), and call its step",
        )
    return scheduler


def _resolved(value: Any) -> Any:
    """Return the function that a value names as "package.module:function", also within lists; other values as they
    are."""
    if isinstance(value, (list, tuple)):
        return [_resolved(v) for v in value]
    if not isinstance(value, str) or not _FUNCTION.fullmatch(value):
        return value
    module, _, name = value.partition(":")
    return getattr(importlib.import_module(module), name)

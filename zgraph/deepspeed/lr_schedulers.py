"""DeepSpeed's schedulers of learning rates as objects: each step sets the rates of an optimizer's groups.

The rates are those of a plan's schedules of the same names (`zgraph.plan.lr_schedules`), which are functions of the update's number. A scheduler
adds what DeepSpeed's have: a position, and the groups that it writes to. `last_batch_iteration` counts from -1, and update k uses the rates that
are set after k steps.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import torch

from zgraph.deepspeed.unsupported import InitializeMisuse
from zgraph.errors import ModelError, PlanError, StepError
from zgraph.names import did_you_mean
from zgraph.plan import lr_schedules as records
from zgraph.record import Record

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


def step_of(scheduler: Any, named: Mapping[str, Any] | None, rows: int) -> Callable[[], Any]:
    """Return the call that advances a scheduler by one update: with the arguments `named`; with `rows` for one that has to be told
    by how much, as Megatron's; None for none.

    Raises `StepError` for a scheduler that takes neither.
    """
    if scheduler is None:
        return lambda: None
    plain = functools.partial(scheduler.step, **(named or {}))
    try:
        takes = inspect.signature(scheduler.step).bind
    except (TypeError, ValueError):  # (a function of C's does not say)
        return plain
    if _fits(takes, **(named or {})):
        return plain
    if not named and _fits(takes, rows):
        return functools.partial(scheduler.step, rows)
    given = f"the arguments {', '.join(named)}" if named else "one number alone"
    raise StepError(
        f"{type(scheduler).__name__}.step does not take {given}",
        where="engine.step(lr_kwargs=…)",
        why="the engine steps its scheduler after each update, with these by name or else with the number of rows",
        hint="the arguments of the scheduler's own step; or step it in the script, and leave lr_scheduler out",
    )


def _fits(takes: Callable[..., Any], *values: Any, **named: Any) -> bool:
    try:
        takes(*values, **named)
    except TypeError:
        return False
    return True


def is_scheduler(given: Any) -> bool:
    """Return whether this is a scheduler, not a function that makes one."""
    return hasattr(given, "step") and not isinstance(given, type)


def refuse_another_optimizers(scheduler: Any, optimizers: Collection[Any]) -> None:
    """Raise `InitializeMisuse` for a scheduler object that would move another optimizer than the engine's (one of
    `optimizers`), and `ModelError` for what is neither a scheduler nor a function."""
    if scheduler is None:
        return
    if not is_scheduler(scheduler):
        if not callable(scheduler):
            raise ModelError(
                f"lr_scheduler is a {type(scheduler).__name__}, no scheduler and no function that makes one"
            )
        return
    moved = getattr(scheduler, "optimizer", None)
    if isinstance(moved, torch.optim.Optimizer) and not any(moved is one for one in optimizers):
        raise InitializeMisuse(
            f"lr_scheduler is a {type(scheduler).__name__} of another optimizer than the engine's",
            why="it would change learning rates that no step uses",
            hint="give initialize its optimizer too; or a function of the optimizer, lr_scheduler=lambda optimizer: …",
        )


class Scheduler:
    """The base of DeepSpeed's schedulers.

    Arguments are the fields of the record of the same name, by name or in DeepSpeed's order; one that is a list has a value
    for each group. Raises `PlanError` for an invalid value.
    """

    record: ClassVar[type[Record]]

    def __init__(
        self, optimizer: torch.optim.Optimizer, *values: Any, last_batch_iteration: int = -1, **named: Any
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"{type(optimizer).__name__} is not a subclass of torch.optim.Optimizer")
        self.optimizer = optimizer
        fields = [name for name in type(self).record.model_fields if name != "name"]
        if len(values) == len(fields) + 1:  # (DeepSpeed's last argument)
            *values, last_batch_iteration = values  # type: ignore[assignment]
        if len(values) > len(fields):
            raise PlanError(f"{type(self).__name__} takes {len(fields)} numbers", hint=", ".join(fields))
        given = dict(zip(fields, values, strict=False)) | named
        for name in given.keys() - set(fields):
            raise PlanError(
                f"{type(self).__name__} has no argument {name!r}", where=name, hint=did_you_mean(name, fields)
            )
        self._records = [self._of_group(given, at) for at in range(len(optimizer.param_groups))]
        self._base = [(float(g["lr"]), _momentum(g)) for g in optimizer.param_groups]
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] = [g["lr"] for g in optimizer.param_groups]
        if last_batch_iteration == -1:
            self._set()

    @classmethod
    def of(cls, record: Any, optimizer: torch.optim.Optimizer) -> Scheduler:
        """Return the scheduler of a plan's record, on an optimizer."""
        kind = next(c for c in _KINDS if c.record is type(record))
        return kind(optimizer, **{k: v for k, v in record.model_dump().items() if k != "name"})

    def _of_group(self, given: dict[str, Any], at: int) -> Any:
        groups = len(self.optimizer.param_groups)
        mine = {}
        for name, value in given.items():
            if isinstance(value, (list, tuple)):
                if len(value) != groups:
                    raise PlanError(f"{name} has {len(value)} values for {groups} groups", where=name)
                value = value[at]
            mine[name] = value
        return type(self).record(**mine)

    def get_lr(self) -> list[float]:
        """Return the rates of the groups for the next update."""
        return [point.lr for point in self._points()]

    def get_last_lr(self) -> list[float]:
        """Return the rates that were set last."""
        return self._last_lr

    def _points(self) -> list[records.Point]:
        done = self.last_batch_iteration + 1
        return [record.at(done, *base) for record, base in zip(self._records, self._base, strict=True)]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by one update, or to the update `last_batch_iteration`."""
        at = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self.last_batch_iteration = at
        self._set()

    def _set(self) -> None:
        for group, point in zip(self.optimizer.param_groups, self._points(), strict=True):
            if isinstance(group["lr"], torch.Tensor):  # (an optimizer may have captured this tensor)
                group["lr"].fill_(point.lr)
            else:
                group["lr"] = point.lr
            self._move(group, point.momentum)
        self._last_lr = [g["lr"] for g in self.optimizer.param_groups]

    def _move(self, group: dict[str, Any], momentum: float) -> None:
        """Set a group's momentum, if the schedule changes it; this one does not."""

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position. (The rates of the groups are in the optimizer's own state.)"""
        self.last_batch_iteration = state["last_batch_iteration"]
        self._last_lr = [g["lr"] for g in self.optimizer.param_groups]


class _Warmup(Scheduler):
    """What DeepSpeed's schedulers with a warm-up say of it."""

    @property
    def warmup_num_steps(self) -> int:
        """The updates of the warm-up: at least 2, between whose logarithms a rate rises."""
        return max(2, self._records[0].warmup_num_steps)

    @property
    def warmup_type(self) -> str:
        """ "log" or "linear"."""
        return str(self._records[0].warmup_type)


class _WarmupOfRates(_Warmup):
    """A warm-up from one rate to another."""

    @property
    def min_lrs(self) -> list[float]:
        """The rates of the groups at the start of the warm-up."""
        return [record.warmup_min_lr for record in self._records]

    @property
    def max_lrs(self) -> list[float]:
        """The rates of the groups at its end: those of the optimizer unless `warmup_max_lr` is given."""
        pairs = zip(self._records, self._base, strict=True)
        return [rate if record.warmup_max_lr is None else record.warmup_max_lr for record, (rate, _) in pairs]


def _momentum(group: dict[str, Any]) -> float:
    return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))


class WarmupLR(_WarmupOfRates):
    """See `zgraph.plan.lr_schedules.WarmupLR`."""

    record = records.WarmupLR


class WarmupDecayLR(_WarmupOfRates):
    """See `zgraph.plan.lr_schedules.WarmupDecayLR`."""

    record = records.WarmupDecayLR


class WarmupCosineLR(_Warmup):
    """See `zgraph.plan.lr_schedules.WarmupCosineLR`."""

    record = records.WarmupCosineLR

    def get_lr_ratio(self) -> float:
        """Return the share of its group's own rate that each rate has now."""
        return self._records[0].at(self.last_batch_iteration + 1, 1.0, 0.0).lr


class OneCycle(Scheduler):
    """See `zgraph.plan.lr_schedules.OneCycle`. Like DeepSpeed's, it sets the second of Adam's betas to 0.99 while it
    cycles the first, and does not change the momentum of other optimizers."""

    record = records.OneCycle

    @property
    def min_lrs(self) -> list[float]:
        """The rates of the groups at both ends of the cycle."""
        return [record.cycle_min_lr for record in self._records]

    @property
    def max_lrs(self) -> list[float]:
        """The rates of the groups at its top."""
        return [record.cycle_max_lr for record in self._records]

    @property
    def step_ratio(self) -> float:
        """The share of the cycle in which rates rise."""
        first, second = self._records[0].cycle_first_step_size, self._records[0].cycle_second_step_size
        return float(first / (first + (first if second is None else second)))

    def step(self, batch_iteration: int | None = None) -> None:
        """Advance by one update, or to the update `batch_iteration`."""
        super().step(batch_iteration)

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return Adam's betas of the groups at this point of the cycle; None if the schedule does not cycle them.

        Before the first step it returns the largest momentum, as DeepSpeed does, although the first update uses the
        smallest.
        """
        if not self._records[0].cycle_momentum:
            return None
        if self.last_batch_iteration == -1:
            return [(record.cycle_max_mom, 0.99) for record in self._records]
        return [(point.momentum, 0.99) for point in self._points()]

    def _move(self, group: dict[str, Any], momentum: float) -> None:
        if "betas" in group and self._records[0].cycle_momentum:
            group["betas"] = (momentum, 0.99)


class LRRangeTest(Scheduler):
    """See `zgraph.plan.lr_schedules.LRRangeTest`."""

    record = records.LRRangeTest

    def step(self, batch_iteration: int | None = None) -> None:
        """Advance by one update, or to the update `batch_iteration`."""
        super().step(batch_iteration)


_KINDS: tuple[type[Scheduler], ...] = (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)


def by_groups(config: Mapping[str, Any]) -> Callable[[torch.optim.Optimizer], Scheduler] | None:
    """Return the function that makes a configuration's scheduler if it has lists of values, one for each of the
    optimizer's groups, which a plan's schedule has not; None if it has none."""
    section = config.get("scheduler")
    if not isinstance(section, Mapping):
        return None
    params = section.get("params") or {}
    kind = next((c for c in _KINDS if c.__name__ == section.get("type")), None)
    if kind is None or not any(isinstance(value, (list, tuple)) for value in params.values()):
        return None
    return lambda optimizer: kind(optimizer, **params)

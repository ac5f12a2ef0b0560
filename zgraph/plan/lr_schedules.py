"""Learning-rate schedules: the rate, and for one of them the momentum, that each update of the optimizer uses.

A schedule is a function of the update's number and of the group's own values, with no state: a run that is resumed, or
that skips an update after an overflow, needs nothing but that number. Nothing here imports torch.

Updates are counted from 0, and a skipped one does not count. The first five schedules are DeepSpeed's
(deepspeed/runtime/lr_schedules.py, 0.19.6), with its names and defaults. Its engine moves the schedule on after an
update, and creating the schedule sets the rate of the first: so update 0 has the rate set at the start, and update k >
0 what DeepSpeed calls iteration k - 1. Where DeepSpeed warns or silently drops a value, this is a `PlanError`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    FiniteFloat,
    JsonValue,
    StrictBool,
    StrictInt,
    model_validator,
)

from zgraph.errors import PlanError
from zgraph.names import did_you_mean
from zgraph.record import Record, short

__all__ = [
    "AnySchedule",
    "Constant",
    "Cosine",
    "LRRangeTest",
    "Linear",
    "OneCycle",
    "Point",
    "TorchSchedule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
]


@dataclass(frozen=True, slots=True)
class Point:
    """The learning rate and momentum that one update of one group of parameters uses."""

    lr: float  # the learning rate itself, not a ratio
    momentum: float  # SGD's momentum, or the first of Adam's betas


_Steps = Annotated[StrictInt, Field(gt=0)]
_Count = Annotated[StrictInt, Field(ge=0)]
_Rate = Annotated[FiniteFloat, Field(ge=0)]
_Ratio = Annotated[FiniteFloat, Field(ge=0, le=1)]
_Momentum = Annotated[FiniteFloat, Field(ge=0, lt=1)]
_WarmupType = Literal["log", "linear"]

_WARMUP_TYPE = "log rises fast at first, linear evenly"
_TOTAL = "updates in the whole run"
_MIN_RATIO = "the rate from total_steps on, as a part of the group's"
_WARMUP_STEPS = "updates before the one that has the full rate"


def _check_order(low_name: str, low: float, high_name: str, high: float) -> None:
    if low > high:
        raise PlanError(f"{low_name} {low} is above {high_name} {high}", where=low_name)


def _check_length(warmup_name: str, warmup: int, total_name: str, total: int) -> None:
    if warmup > total:
        raise PlanError(
            f"a warm-up of {warmup} updates is longer than the run of {total}",
            where=warmup_name,
            hint=f"a smaller {warmup_name} or a larger {total_name}",
        )


# DeepSpeed's schedules.


def _warmup_steps(steps: int) -> int:
    return max(2, steps)  # as DeepSpeed: the logarithm of 1 can't be divided by


def _iteration(step: int) -> int:
    # The rate that DeepSpeed sets at the start is that of its iteration 0, except in WarmupCosineLR.
    return max(step - 1, 0)


def _risen(iteration: int, steps: int, kind: str) -> float:
    """Return how much of a warm-up is done, from 0 to 1."""
    return math.log(iteration + 1) / math.log(steps) if kind == "log" else iteration / steps


class WarmupLR(Record, frozen=True):
    """DeepSpeed's `WarmupLR`: the rate rises from `warmup_min_lr` to `warmup_max_lr`, and stays there.

    Rates are absolute and replace the group's own rate, which is the maximum only where `warmup_max_lr` is None. With
    n = max(2, warmup_num_steps) and iteration i = max(k - 1, 0), update k has min + (max - min) g, where g is log(i +
    1) / log(n) or i / n while i < n, and 1 after that. So updates 0 and 1 both have the minimum.
    """

    name: Literal["WarmupLR"] = "WarmupLR"
    warmup_min_lr: _Rate = Field(default=0.0, description="the rate of the first update")
    warmup_max_lr: _Rate | None = Field(default=None, description="the rate after the warm-up; None: the group's")
    warmup_num_steps: _Steps = Field(default=1000, description="updates in the warm-up")
    warmup_type: _WarmupType = Field(default="log", description=_WARMUP_TYPE)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.warmup_max_lr is not None:
            _check_order("warmup_min_lr", self.warmup_min_lr, "warmup_max_lr", self.warmup_max_lr)
        return self

    def at(self, step: int, lr: float, momentum: float) -> Point:
        """Return what update `step`, from 0, uses in a group with this rate and momentum."""
        warmup, iteration = _warmup_steps(self.warmup_num_steps), _iteration(step)
        top = lr if self.warmup_max_lr is None else self.warmup_max_lr
        height = _risen(iteration, warmup, self.warmup_type) if iteration < warmup else 1.0
        return Point(self.warmup_min_lr + (top - self.warmup_min_lr) * height, momentum)


class WarmupDecayLR(Record, frozen=True):
    """DeepSpeed's `WarmupDecayLR`: `WarmupLR`, then down in a straight line to `warmup_min_lr`.

    After the warm-up g is max(0, (total - i) / max(1, total - n)), with the n and i of `WarmupLR`: the minimum is
    reached in update total + 1. Unlike in `WarmupLR`, the maximum has a default of its own.
    """

    name: Literal["WarmupDecayLR"] = "WarmupDecayLR"
    total_num_steps: _Steps = Field(description=_TOTAL)
    warmup_min_lr: _Rate = Field(default=0.0, description="the rate of the first update, and of the end")
    warmup_max_lr: _Rate = Field(default=0.001, description="the rate after the warm-up")
    warmup_num_steps: _Steps = Field(default=1000, description="updates in the warm-up")
    warmup_type: _WarmupType = Field(default="log", description=_WARMUP_TYPE)

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_order("warmup_min_lr", self.warmup_min_lr, "warmup_max_lr", self.warmup_max_lr)
        _check_length("warmup_num_steps", self.warmup_num_steps, "total_num_steps", self.total_num_steps)
        return self

    def at(self, step: int, lr: float, momentum: float) -> Point:
        """Return what update `step`, from 0, uses in a group with this momentum, whatever the group's rate."""
        warmup, iteration = _warmup_steps(self.warmup_num_steps), _iteration(step)
        if iteration < warmup:
            height = _risen(iteration, warmup, self.warmup_type)
        else:
            height = max(0.0, (self.total_num_steps - iteration) / max(1, self.total_num_steps - warmup))
        return Point(self.warmup_min_lr + (self.warmup_max_lr - self.warmup_min_lr) * height, momentum)


class WarmupCosineLR(Record, frozen=True):
    """DeepSpeed's `WarmupCosineLR`: ratios of the group's rate, up to 1 and down along a cosine.

    With n = max(2, warmup_num_steps), update 0 has 0, whatever the minimum; update k in 1..n has, with i = k - 1,
    m + (1 - m) g, where m is `warmup_min_ratio` and g is log(i + 1) / log(n) or i / n; a later one has
    c + (1 - c) (1 + cos(pi p)) / 2, where c is `cos_min_ratio` and p = min(1, (k - n) / max(1, total - n)).
    """

    name: Literal["WarmupCosineLR"] = "WarmupCosineLR"
    total_num_steps: _Steps = Field(description=_TOTAL)
    warmup_min_ratio: _Ratio = Field(default=0.0, description="where the warm-up begins, as a part of the group's rate")
    warmup_num_steps: _Steps = Field(default=1000, description="updates in the warm-up")
    cos_min_ratio: _Ratio = Field(default=0.0001, description="where the cosine ends, as a part of the group's rate")
    warmup_type: _WarmupType = Field(default="log", description=_WARMUP_TYPE)

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_length("warmup_num_steps", self.warmup_num_steps, "total_num_steps", self.total_num_steps)
        return self

    def at(self, step: int, lr: float, momentum: float) -> Point:
        """Return what update `step`, from 0, uses in a group with this rate and momentum."""
        warmup = _warmup_steps(self.warmup_num_steps)
        if step == 0:
            ratio = 0.0
        elif step <= warmup:
            height = _risen(step - 1, warmup, self.warmup_type)
            ratio = self.warmup_min_ratio + (1 - self.warmup_min_ratio) * height
        else:
            done = min(1.0, (step - warmup) / max(1, self.total_num_steps - warmup))
            ratio = self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2
        return Point(lr * ratio, momentum)


class OneCycle(Record, frozen=True):
    """DeepSpeed's `OneCycle`: the rate goes up and down once while the momentum goes down and up, then both decay.

    Rates and momenta are absolute and replace the group's own. A cycle has total = first + second updates. Update k <=
    total has min + (max - min) h, where h is k / first up to k = first, then (total - k) / second, and 0 at k = total.
    With c stairs in a half, its h is floor(c h) / c. After the cycle, with t = (k - total) / decay_step_size, the rate
    is min / (1 + decay_lr_rate t), or min if there is no decay.

    The momentum is max - (max - min) h, and after the cycle max (1 + decay_mom_rate t), which nothing keeps below 1,
    or max if there is no decay. Update 0 has the minimum: DeepSpeed sets it at the start, and goes on from the maximum
    in update 1. DeepSpeed also makes Adam's second beta 0.99 and leaves optimizers without betas alone; neither is
    done here. The policy is that of Smith, 2018, "A disciplined approach to neural network hyper-parameters: Part 1".
    """

    name: Literal["OneCycle"] = "OneCycle"
    cycle_min_lr: _Rate = Field(description="the rate at both ends of the cycle")
    cycle_max_lr: _Rate = Field(description="the rate at the top of the cycle")
    decay_lr_rate: _Rate = Field(default=0.0, description="how fast the rate falls after the cycle; 0: it stays")
    cycle_first_step_size: _Steps = Field(default=2000, description="updates on the way up")
    cycle_second_step_size: _Count | None = Field(default=None, description="updates on the way down; None: as up")
    cycle_first_stair_count: _Count = Field(default=0, description="stairs on the way up; 0: a straight line")
    cycle_second_stair_count: _Count | None = Field(default=None, description="stairs on the way down; None: as up")
    decay_step_size: _Count = Field(default=0, description="updates per unit of the decay; 0: no decay")
    cycle_momentum: StrictBool = Field(default=True, description="whether the momentum moves too")
    cycle_min_mom: _Momentum = Field(default=0.8, description="the momentum at the top of the cycle")
    cycle_max_mom: _Momentum = Field(default=0.9, description="the momentum at both ends of the cycle")
    decay_mom_rate: FiniteFloat = Field(default=0.0, description="how fast the momentum grows after the cycle")

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_order("cycle_min_lr", self.cycle_min_lr, "cycle_max_lr", self.cycle_max_lr)
        _check_order("cycle_min_mom", self.cycle_min_mom, "cycle_max_mom", self.cycle_max_mom)
        for rate in ("decay_lr_rate", "decay_mom_rate"):
            if getattr(self, rate) and not self.decay_step_size:
                raise PlanError(
                    f"{rate} has no effect without decay_step_size", where=rate, hint="give decay_step_size, in updates"
                )
        return self

    def at(self, step: int, lr: float, momentum: float) -> Point:
        """Return what update `step`, from 0, uses in a group with this momentum, whatever the group's rate."""
        first, second = self.cycle_first_step_size, self.cycle_second_step_size
        total = first + (first if second is None else second)
        if step <= total:
            height = self._height(step % total, total)
            rate = self.cycle_min_lr + (self.cycle_max_lr - self.cycle_min_lr) * height
            cycled = self.cycle_max_mom - (self.cycle_max_mom - self.cycle_min_mom) * height
        else:
            decay = (step - total) / self.decay_step_size if self.decay_step_size else 0.0
            rate = self.cycle_min_lr / (1 + self.decay_lr_rate * decay)
            cycled = self.cycle_max_mom * (1 + self.decay_mom_rate * decay)
        if step == 0:
            cycled = self.cycle_min_mom
        return Point(rate, cycled if self.cycle_momentum else momentum)

    def _height(self, position: int, total: int) -> float:
        up, stairs = self.cycle_first_step_size, self.cycle_first_stair_count
        if position <= up:
            part, whole = position, up
        else:
            part, whole = total - position, total - up
            if self.cycle_second_stair_count is not None:
                stairs = self.cycle_second_stair_count
        # In whole numbers, since a rounding error of 1e-16 below a stair would lose a whole stair.
        return part * stairs // whole / stairs if stairs else part / whole


class LRRangeTest(Record, frozen=True):
    """DeepSpeed's `LRRangeTest`: a rate that grows without end, to find the largest with which a model can be trained.

    Update k has `lr_range_test_min_lr` (1 + `lr_range_test_step_rate` t), where t is k / `lr_range_test_step_size`,
    rounded down with `lr_range_test_staircase`. The group's own rate is not used. The test is that of Smith, 2018, "A
    disciplined approach to neural network hyper-parameters: Part 1".
    """

    name: Literal["LRRangeTest"] = "LRRangeTest"
    lr_range_test_min_lr: _Rate = Field(default=1e-3, description="the rate of the first update")
    lr_range_test_step_size: _Steps = Field(default=2000, description="updates per unit of growth")
    lr_range_test_step_rate: _Rate = Field(default=1.0, description="growth, as a part of the first rate")
    lr_range_test_staircase: StrictBool = Field(default=False, description="whether it grows in stairs")

    def at(self, step: int, lr: float, momentum: float) -> Point:
        """Return what update `step`, from 0, uses in a group with this momentum, whatever the group's rate."""
        size = self.lr_range_test_step_size
        interval = step // size if self.lr_range_test_staircase else step / size
        return Point(self.lr_range_test_min_lr * (1 + self.lr_range_test_step_rate * interval), momentum)


# zgraph's own schedules: ratios of the group's rate, above 0 in the first update.


def _ramp(step: int, warmup: int) -> float:
    return min(1.0, (step + 1) / (warmup + 1))


def _done(step: int, warmup: int, total: int) -> float:
    """Return how much of the updates after the warm-up is done, from 0 to 1."""
    return 1.0 if step >= total else max(0, step - warmup) / max(1, total - warmup)


class _Decay(Record, frozen=True):
    """The rate rises in a straight line to the group's rate, then falls to a part of it, along a curve that each
    subclass defines."""

    name: str
    warmup_steps: _Count = Field(default=0, description=_WARMUP_STEPS)
    total_steps: _Steps = Field(description=_TOTAL)
    min_ratio: _Ratio = Field(default=0.0, description=_MIN_RATIO)

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_length("warmup_steps", self.warmup_steps, "total_steps", self.total_steps)
        return self

    def at(self, step: int, lr: float, momentum: float) -> Point:
        """Return what update `step`, from 0, uses in a group with this rate and momentum."""
        height = self._height(_done(step, self.warmup_steps, self.total_steps))
        ratio = self.min_ratio + (1 - self.min_ratio) * height
        return Point(lr * _ramp(step, self.warmup_steps) * ratio, momentum)

    def _height(self, done: float) -> float:
        """Return how high the rate is above its end, from 1 to 0, when the share `done` of the way down is done."""
        raise NotImplementedError


class Cosine(_Decay, frozen=True):
    """The rate rises in a straight line to the group's rate, then falls along half a cosine to `min_ratio` of it.

    Update k has the rate times (k + 1) / (warmup + 1) while k < warmup, then times m + (1 - m) (1 + cos(pi p)) / 2,
    where m is `min_ratio` and p = (k - warmup) / (total - warmup): all of it in update `warmup_steps`, and m from
    update `total_steps` on. The cosine is that of Loshchilov and Hutter, 2017, "SGDR", without restarts.
    """

    name: Literal["Cosine"] = "Cosine"

    def _height(self, done: float) -> float:
        return (1 + math.cos(math.pi * done)) / 2


class Linear(_Decay, frozen=True):
    """The rate rises in a straight line to the group's rate, then falls in another to `min_ratio` of it.

    It is `Cosine` with 1 - p in place of (1 + cos(pi p)) / 2.
    """

    name: Literal["Linear"] = "Linear"

    def _height(self, done: float) -> float:
        return 1 - done


class Constant(Record, frozen=True):
    """The rate rises in a straight line to the group's rate, and stays: update k has it times min(1, (k + 1) / (warmup
    + 1))."""

    name: Literal["Constant"] = "Constant"
    warmup_steps: _Count = Field(default=0, description=_WARMUP_STEPS)

    def at(self, step: int, lr: float, momentum: float) -> Point:
        """Return what update `step`, from 0, uses in a group with this rate and momentum."""
        return Point(lr * _ramp(step, self.warmup_steps), momentum)


# torch's schedules.

_NAME = r"[^\W\d]\w*"
_REFERENCE = re.compile(rf"{_NAME}|{_NAME}(?:\.{_NAME})*:{_NAME}(?:\.{_NAME})*")


def _check_reference(text: str) -> str:
    if not _REFERENCE.fullmatch(text):
        raise PlanError(
            f"{text!r} does not name a schedule of torch's kind",
            hint='a class of torch.optim.lr_scheduler, or "package.module:Class" for another',
        )
    return text


class TorchSchedule(Record, frozen=True):
    """A class of torch.optim.lr_scheduler, or one like them, by its name: it keeps its state and changes the
    optimizer's groups.

    It decides itself what each update uses, so it has no `at`.
    """

    name: Literal["TorchSchedule"] = "TorchSchedule"
    scheduler: Annotated[str, AfterValidator(_check_reference)] = Field(
        description='a class of torch.optim.lr_scheduler, or "package.module:Class" for another'
    )
    args: dict[str, JsonValue] = Field(
        default_factory=dict, description="what the class is called with, by name, without the optimizer"
    )


_KINDS: dict[str, type[Record]] = {
    kind.__name__: kind
    for kind in (
        *(WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest),
        *(Cosine, Linear, Constant, TorchSchedule),
    )
}


def _made(value: Any) -> Any:
    # The record is created here and not by the union, whose errors would have the name in the key's path.
    if not isinstance(value, Mapping):
        return value
    if "name" not in value:
        raise PlanError("a schedule without a name", where="name", hint=f"one of {', '.join(_KINDS)}")
    name = value["name"]
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise PlanError(
            f"no schedule is called {short(name)}",
            where="name",
            hint=f"{did_you_mean(str(name), _KINDS)} (TorchSchedule takes any class of torch.optim.lr_scheduler)",
        )
    return kind.model_validate(value)


AnySchedule = Annotated[
    WarmupLR | WarmupDecayLR | WarmupCosineLR | OneCycle | LRRangeTest | Cosine | Linear | Constant | TorchSchedule,
    Field(discriminator="name"),
    BeforeValidator(_made),
]
"""The type of a plan's field that holds a schedule: a record of this module, or a mapping that has its name."""

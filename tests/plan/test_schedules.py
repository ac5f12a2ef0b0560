"""Every schedule gives what its formula says at every update, and a schedule that means nothing is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from zgraph.errors import PlanError
from zgraph.plan.lr_schedules import (
    AnySchedule,
    Constant,
    Cosine,
    Linear,
    LRRangeTest,
    OneCycle,
    Point,
    TorchSchedule,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from zgraph.record import Record

pytestmark = pytest.mark.core

LR, MOMENTUM = 3e-3, 0.77
UPDATES = np.arange(4000)
BEFORE = np.maximum(UPDATES - 1, 0)
"""DeepSpeed's iteration in each update, where the one set at the start is iteration 0's."""

Values = np.ndarray


class Owner(Record, frozen=True):
    """A record that has a schedule, as a plan."""

    schedule: AnySchedule | None = None


def values(schedule) -> tuple[Values, Values]:
    points = [schedule.at(int(step), LR, MOMENTUM) for step in UPDATES]
    return np.array([point.lr for point in points]), np.array([point.momentum for point in points])


def same(got: Values, expected: Values | float) -> None:
    np.testing.assert_allclose(got, np.broadcast_to(expected, got.shape), rtol=1e-12, atol=1e-18)


def rise(iteration: Values, steps: int, kind: str) -> Values:
    """0 at iteration 0 and 1 from iteration `steps` on (for "log", from the one before)."""
    if kind == "linear":
        return np.interp(iteration, [0, steps], [0, 1])
    return np.minimum(1, np.log2(iteration + 1) / np.log2(steps))


# DeepSpeed's, against curves made of knots.


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("steps", [2, 3, 300, 1000])
def test_warmup_takes_the_groups_rate_or_its_own(kind, steps):
    lr, momentum = values(WarmupLR(warmup_num_steps=steps, warmup_type=kind))
    same(lr, LR * rise(BEFORE, steps, kind))
    same(momentum, MOMENTUM)
    lr, _ = values(WarmupLR(warmup_min_lr=1e-4, warmup_max_lr=0.01, warmup_num_steps=steps, warmup_type=kind))
    same(lr, 1e-4 + (0.01 - 1e-4) * rise(BEFORE, steps, kind))


def test_a_warmup_of_one_is_one_of_two():
    assert [WarmupLR(warmup_num_steps=1).at(step, 1.0, 0.9).lr for step in range(5)] == [0, 0, 1, 1, 1]
    assert values(WarmupLR(warmup_num_steps=1))[0].tolist() == values(WarmupLR(warmup_num_steps=2))[0].tolist()


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize(("warmup", "total"), [(1000, 2500), (100, 3999), (300, 300), (10, 11)])
def test_warmup_and_decay_end_at_the_minimum(kind, warmup, total):
    schedule = WarmupDecayLR(warmup_num_steps=warmup, total_num_steps=total, warmup_min_lr=1e-4, warmup_type=kind)
    lr, momentum = values(schedule)
    knots = np.interp(BEFORE, [warmup, max(total, warmup + 1)], [1, 0]) if total > warmup else 0.0
    height = np.where(warmup > BEFORE, rise(BEFORE, warmup, kind), knots)
    same(lr, 1e-4 + (0.001 - 1e-4) * height)
    same(momentum, MOMENTUM)
    assert schedule.at(total + 1, LR, MOMENTUM).lr == schedule.at(0, LR, MOMENTUM).lr == 1e-4


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize(("warmup", "total"), [(1000, 2500), (77, 3000), (300, 300)])
def test_warmup_and_cosine_are_ratios_of_the_groups_rate(kind, warmup, total):
    low, end = 0.1, 0.2
    schedule = WarmupCosineLR(
        **dict(warmup_num_steps=warmup, total_num_steps=total, warmup_min_ratio=low),
        **dict(cos_min_ratio=end, warmup_type=kind),
    )
    lr, momentum = values(schedule)
    angle = np.interp(UPDATES, [warmup, max(total, warmup + 1)], [0, np.pi])
    ratio = np.where(
        warmup > BEFORE, low + (1 - low) * rise(BEFORE, warmup, kind), (1 + end + (1 - end) * np.cos(angle)) / 2
    )
    ratio[0] = 0.0
    same(lr, LR * ratio)
    same(momentum, MOMENTUM)
    assert schedule.at(1, LR, MOMENTUM).lr == LR * low, "update 0 alone is below the minimum"
    assert schedule.at(total + 1, 1.0, MOMENTUM).lr == pytest.approx(end)


CYCLE = dict(cycle_min_lr=1e-3, cycle_max_lr=1e-2)


@pytest.mark.parametrize(
    ("first", "second"), [(2000, None), (300, 700), (301, 703), (1, 1), (500, 0)], ids=lambda count: str(count)
)
@pytest.mark.parametrize(
    "decay", [{}, dict(decay_step_size=50, decay_lr_rate=0.1, decay_mom_rate=-0.001)], ids=["", "decay"]
)
def test_one_cycle_moves_the_momentum_against_the_rate(first, second, decay):
    schedule = OneCycle(**CYCLE, cycle_first_step_size=first, cycle_second_step_size=second, **decay)
    lr, momentum = values(schedule)
    total = 2 * first if second is None else first + second
    late = np.maximum(UPDATES - total, 0) / 50 if decay else np.zeros(len(UPDATES))
    height = np.interp(UPDATES, [0, first, max(total, first + 1)], [0, 1, 0])
    height[total:] = 0
    same(lr, (1e-3 + 9e-3 * height) / (1 + 0.1 * late))
    expected = (0.9 - 0.1 * height) * (1 - 0.001 * late)
    expected[0] = 0.8
    same(momentum, expected)


def test_one_cycle_can_leave_the_momentum_alone():
    same(values(OneCycle(**CYCLE, cycle_momentum=False))[1], MOMENTUM)


@pytest.mark.parametrize(("up", "down"), [(7, 11), (300, None), (5, 0), (0, 3), (1, 1)])
def test_one_cycle_in_stairs(up, down):
    first, second = 300, 701
    schedule = OneCycle(
        **dict(**CYCLE, cycle_first_step_size=first, cycle_second_step_size=second, cycle_momentum=False),
        **dict(cycle_first_stair_count=up, cycle_second_stair_count=down),
    )
    lr, _ = values(schedule)
    height = np.zeros(len(UPDATES))
    for part, whole, stairs, at in (
        (np.arange(first + 1), first, up, slice(0, first + 1)),
        (np.arange(second)[::-1], second, up if down is None else down, slice(first + 1, first + second + 1)),
    ):
        reached = [max(stair for stair in range(stairs + 1) if stair * whole <= n * stairs) for n in part]
        height[at] = np.array(reached) / stairs if stairs else part / whole
    same(lr, 1e-3 + 9e-3 * height)


@pytest.mark.parametrize("size", [1, 7, 2000])
def test_the_range_test_grows_without_end(size):
    lr, momentum = values(LRRangeTest(lr_range_test_step_size=size, lr_range_test_step_rate=0.3))
    same(lr, np.linspace(1e-3, 1e-3 * (1 + 0.3 * 4000 / size), 4001)[:-1])
    same(momentum, MOMENTUM)
    lr, _ = values(LRRangeTest(lr_range_test_min_lr=0.5, lr_range_test_step_size=size, lr_range_test_staircase=True))
    same(lr, 0.5 + 0.5 * np.repeat(np.arange(4000), size)[:4000])


# zgraph's own.


def ramp(warmup: int) -> Values:
    return np.interp(UPDATES + 1, [0, warmup + 1], [0, 1])


@pytest.mark.parametrize("least", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(("warmup", "total"), [(0, 3000), (500, 3000), (1, 2), (300, 300), (0, 1)])
def test_cosine_and_linear_end_at_their_minimum(warmup, total, least):
    options = dict(warmup_steps=warmup, total_steps=total, min_ratio=least)
    done = np.interp(UPDATES, [warmup, total], [0, 1]) if total > warmup else (total <= UPDATES) * 1.0
    for schedule, curve in (
        (Linear(**options), 1 - done),
        (Cosine(**options), np.cos(np.pi / 2 * done) ** 2),
    ):
        lr, momentum = values(schedule)
        np.testing.assert_allclose(lr, LR * ramp(warmup) * (least + (1 - least) * curve), rtol=1e-9, atol=1e-18)
        same(momentum, MOMENTUM)
        same(lr[total:], LR * least if warmup < total else LR * ramp(warmup)[total:] * least)
        assert lr[0] > 0


def test_without_a_warmup_cosine_and_linear_are_torchs():
    for ours, theirs in (
        (
            Cosine(total_steps=400, min_ratio=0.1),
            lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 400, eta_min=0.1 * LR),
        ),
        (
            Linear(total_steps=400, min_ratio=0.1),
            lambda opt: torch.optim.lr_scheduler.LinearLR(opt, start_factor=1.0, end_factor=0.1, total_iters=400),
        ),
    ):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
        scheduler = theirs(optimizer)
        for step in range(400):
            assert optimizer.param_groups[0]["lr"] == pytest.approx(ours.at(step, LR, MOMENTUM).lr, rel=1e-9)
            optimizer.step()
            scheduler.step()


def test_constant_has_the_whole_rate_after_its_warmup():
    same(values(Constant())[0], LR)
    lr, momentum = values(Constant(warmup_steps=9))
    same(lr, LR * ramp(9))
    same(momentum, MOMENTUM)
    assert Constant(warmup_steps=9).at(9, LR, MOMENTUM) == Point(LR, MOMENTUM)
    assert Constant(warmup_steps=9).at(0, LR, MOMENTUM).lr == pytest.approx(LR / 10)


# In a plan.

EVERY_KIND = [
    WarmupLR(warmup_max_lr=0.1),
    WarmupDecayLR(total_num_steps=2000),
    WarmupCosineLR(total_num_steps=2000, warmup_type="linear"),
    OneCycle(**CYCLE, cycle_second_step_size=3),
    LRRangeTest(lr_range_test_staircase=True),
    Cosine(total_steps=10),
    Linear(total_steps=10, warmup_steps=2),
    Constant(),
    TorchSchedule(scheduler="CosineAnnealingLR", args={"T_max": 100, "eta_min": 0.1}),
    TorchSchedule(scheduler="my.package:Schedule"),
]


@pytest.mark.parametrize("schedule", EVERY_KIND, ids=lambda schedule: schedule.name)
def test_a_schedule_survives_json(schedule):
    owner = Owner(schedule=schedule)
    assert owner.schedule == schedule
    saved = json.loads(json.dumps(owner.model_dump(mode="json")))
    assert next(iter(saved["schedule"])) == "name"
    assert Owner(**saved) == owner
    assert type(Owner(**saved).schedule) is type(schedule)
    assert Owner.model_validate_json(json.dumps(saved)) == owner


def test_the_schema_has_every_kind():
    assert {schedule.name for schedule in EVERY_KIND} <= set(Owner.model_json_schema()["$defs"])


def test_the_module_does_not_import_torch():
    code = "import sys, zgraph.plan.lr_schedules, zgraph.plan.loss_scaling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("values", "where", "says"),
    [
        ({"name": "WarmupLr"}, "schedule.name", "did you mean 'WarmupLR'?"),
        ({"name": "CosineAnnealingLR"}, "schedule.name", "TorchSchedule takes any class of torch.optim.lr_scheduler"),
        ({"name": ["Cosine"]}, "schedule.name", "no schedule is called"),
        ({"total_steps": 3}, "schedule.name", "one of WarmupLR, WarmupDecayLR"),
        ("Cosine", "schedule", "can't be the value of schedule"),
        ({"name": "Cosine"}, "schedule.total_steps", "updates in the whole run"),
        ({"name": "Linear", "warmup_steps": 5}, "schedule.total_steps", "updates in the whole run"),
        ({"name": "WarmupDecayLR"}, "schedule.total_num_steps", "updates in the whole run"),
        ({"name": "WarmupCosineLR"}, "schedule.total_num_steps", "updates in the whole run"),
        ({"name": "Cosine", "total_step": 3, "total_steps": 3}, "schedule.total_step", "did you mean 'total_steps'?"),
    ],
)
def test_a_fault_is_told_with_its_key_in_the_plan(values, where, says):
    with pytest.raises(PlanError) as caught:
        Owner(schedule=values)
    assert caught.value.where == where
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: WarmupLR(warmup_num_steps=0), "warmup_num_steps"),
        (lambda: WarmupLR(warmup_num_steps=True), "warmup_num_steps"),
        (lambda: WarmupLR(warmup_num_steps=10.0), "warmup_num_steps"),
        (lambda: WarmupLR(warmup_type="cosine"), "warmup_type"),
        (lambda: WarmupLR(warmup_max_lr=-1.0), "warmup_max_lr"),
        (lambda: WarmupLR(warmup_min_lr=0.2, warmup_max_lr=0.1), "warmup_min_lr"),
        (lambda: WarmupLR(warmup_max_lr=math.nan), "warmup_max_lr"),
        (lambda: WarmupDecayLR(total_num_steps=999), "warmup_num_steps"),
        (lambda: WarmupDecayLR(total_num_steps=-1), "total_num_steps"),
        (lambda: WarmupDecayLR(total_num_steps=2000, warmup_min_lr=0.01), "warmup_min_lr"),
        (lambda: WarmupCosineLR(total_num_steps=999), "warmup_num_steps"),
        (lambda: WarmupCosineLR(total_num_steps=2000, cos_min_ratio=1.5), "cos_min_ratio"),
        (lambda: OneCycle(cycle_min_lr=0.2, cycle_max_lr=0.1), "cycle_min_lr"),
        (lambda: OneCycle(**CYCLE, cycle_first_step_size=0), "cycle_first_step_size"),
        (lambda: OneCycle(**CYCLE, cycle_second_step_size=-1), "cycle_second_step_size"),
        (lambda: OneCycle(**CYCLE, cycle_min_mom=0.95), "cycle_min_mom"),
        (lambda: OneCycle(**CYCLE, cycle_max_mom=1.0), "cycle_max_mom"),
        (lambda: OneCycle(**CYCLE, decay_lr_rate=0.1), "decay_lr_rate"),
        (lambda: OneCycle(**CYCLE, decay_mom_rate=0.1), "decay_mom_rate"),
        (lambda: LRRangeTest(lr_range_test_step_size=0), "lr_range_test_step_size"),
        (lambda: Cosine(total_steps=0), "total_steps"),
        (lambda: Cosine(total_steps=10, warmup_steps=11), "warmup_steps"),
        (lambda: Cosine(total_steps=10, min_ratio=-0.1), "min_ratio"),
        (lambda: Linear(total_steps=10, warmup_steps=11), "warmup_steps"),
        (lambda: Constant(warmup_steps=-1), "warmup_steps"),
        (lambda: TorchSchedule(scheduler="Cosine Annealing"), "scheduler"),
        (lambda: TorchSchedule(scheduler="torch.optim.lr_scheduler.StepLR"), "scheduler"),
        (lambda: TorchSchedule(scheduler="package:"), "scheduler"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(make: Callable[[], object], where):
    with pytest.raises(PlanError) as caught:
        make()
    assert caught.value.where == where


def test_a_schedule_holds_no_callable():
    with pytest.raises(PlanError):
        TorchSchedule(scheduler="LambdaLR", args={"lr_lambda": lambda step: 1.0})

"""The loss scale moves as DeepSpeed's does, in eager and in a traced program, and a record that can't is refused."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from sweeps import product
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from zgraph.errors import PlanError
from zgraph.plan.loss_scaling import LossScale
from zgraph.update import scaler

pytestmark = pytest.mark.core

STEPS = 3000


class DeepSpeedRule:
    """The documented rule in plain Python, with the two things that zgraph adds: a top, and no exception at the bottom.

    An overflow counts down, or halves once the count is at 1. A clean step doubles if the clean steps before it since
    the overflow are a positive multiple of the window.
    """

    def __init__(self, record: LossScale) -> None:
        self.record = record
        self.floor = float(np.float32(record.min_loss_scale))
        self.scale = 2.0**record.initial_scale_power if record.static is None else record.static
        self.left = record.hysteresis
        self.clean_before = 0
        self.skipped = 0
        self.exhausted = False

    def step(self, overflow: bool) -> None:
        self.skipped += overflow
        if self.record.static is None:
            self._overflowed() if overflow else self._was_clean()
        self.clean_before = 0 if overflow else self.clean_before + 1

    def _overflowed(self) -> None:
        if self.record.hysteresis == 1 or self.left == 1:
            self.exhausted |= self.scale == self.floor
            self.scale = max(self.scale / 2, self.floor)
        else:
            self.left -= 1

    def _was_clean(self) -> None:
        if self.record.consecutive_hysteresis:
            self.left = self.record.hysteresis
        if self.clean_before > 0 and self.clean_before % self.record.loss_scale_window == 0:
            if not self.record.consecutive_hysteresis:
                self.left = self.record.hysteresis
            self.scale = min(self.scale * 2, 2.0**126)


def scripts() -> list[list[bool]]:
    """Overflows by step: none, all, at several rates, and in bursts with long clean stretches between them."""
    made = [[False] * STEPS, [True] * STEPS]
    for seed, rate in enumerate((0.0005, 0.002, 0.02, 0.1, 0.2, 0.5)):
        rng = random.Random(seed)
        made.append([rng.random() < rate for _ in range(STEPS)])
    for seed, longest in enumerate((15, 200, 1100)):
        rng, burst = random.Random(100 + seed), []
        while len(burst) < STEPS:
            burst += [True] * rng.randint(1, 6) + [False] * rng.randint(1, longest)
        made.append(burst[:STEPS])
    return made


def check(record: LossScale, overflows: list[list[bool]]) -> None:
    """Every operation of the rule is elementwise, so all scripts run at once, each an element of the state."""
    state = {name: value.repeat(len(overflows)) for name, value in scaler.initial(record).items()}
    rules = [DeepSpeedRule(record) for _ in overflows]
    for step, happened in enumerate(zip(*overflows, strict=True)):
        state = scaler.advance(record, state, torch.tensor(happened))
        for rule, overflow in zip(rules, happened, strict=True):
            rule.step(overflow)
        for name in ("scale", "skipped", "exhausted"):
            assert state[name].tolist() == [getattr(rule, name) for rule in rules], (name, step)
    assert state["iteration"].tolist() == [len(overflows[0])] * len(overflows)


@product("consecutive, hysteresis, window", [False, True], [1, 2, 3], [7, 1000], together=1)
def test_the_scale_moves_as_deepspeeds_at_every_step(window, hysteresis, consecutive):
    check(
        LossScale(loss_scale_window=window, hysteresis=hysteresis, consecutive_hysteresis=consecutive),
        scripts(),
    )


@pytest.mark.parametrize("minimum", [0.25, 0.1, 3.0, 2.0**16])
def test_the_scale_stops_at_its_minimum(minimum):
    check(LossScale(loss_scale_window=3, min_loss_scale=minimum), [script[:200] for script in scripts()])


def test_a_window_of_one_doubles_in_every_second_clean_step_and_on():
    state = scaler.initial(LossScale(loss_scale_window=1, initial_scale_power=0))
    scales = []
    for overflow in (False, False, False, True, True, False, False):
        state = scaler.advance(LossScale(loss_scale_window=1), state, torch.tensor(overflow))
        scales.append(state["scale"].item())
    assert scales == [1, 2, 4, 4, 2, 2, 4]


def test_the_scale_is_never_infinite():
    record = LossScale(loss_scale_window=1, initial_scale_power=125, hysteresis=1)
    check(record, [[False] * 10 + [True] * 3])


def test_a_fixed_scale_only_counts():
    record = LossScale(static=1000.0, min_loss_scale=1000.0, hysteresis=1, loss_scale_window=1)
    check(record, [[False] * 10, [True] * 10, [True, False] * 5])


def test_the_state_is_of_0_dim_tensors_that_keep_their_dtypes():
    for record in (LossScale(), LossScale(static=8.0)):
        state = scaler.initial(record)
        after = scaler.advance(record, state, torch.tensor(True))
        assert {name: (value.shape, value.dtype) for name, value in state.items()} == {
            name: (value.shape, value.dtype) for name, value in after.items()
        }
        assert {name: str(value.dtype) for name, value in state.items()} == {
            "scale": "torch.float32",
            "iteration": "torch.int64",
            "last_overflow": "torch.int64",
            "hysteresis": "torch.int64",
            "skipped": "torch.int64",
            "exhausted": "torch.bool",
        }
        assert all(value.shape == () for value in state.values())


def test_nothing_is_changed_in_place():
    record = LossScale(hysteresis=1)
    state = scaler.initial(record)
    scaler.advance(record, state, torch.tensor(True))
    assert state == scaler.initial(record)


@pytest.mark.parametrize(
    "record",
    [
        LossScale(initial_scale_power=2, loss_scale_window=3, hysteresis=hysteresis, consecutive_hysteresis=consecutive)
        for hysteresis, consecutive in itertools.product((1, 3), (False, True))
    ]
    + [LossScale(static=128.0)],
    ids=repr,
)
def test_a_traced_program_does_the_same(record):
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(value) for name, value in scaler.initial(record).items()}
        overflow = mode.from_tensor(torch.tensor(False))
        traced = make_fx(lambda state, overflow: scaler.advance(record, state, overflow))(fake, overflow)
    operators = {node.target for node in traced.graph.nodes if node.op == "call_function"}
    assert torch.ops.aten._local_scalar_dense.default not in operators, "the host would wait for the device"
    assert not [operator for operator in operators if operator._schema.is_mutable]
    assert not [name for name, _ in traced.named_buffers()], "a constant tensor would be of one device"

    rng = random.Random(5)
    eager = program = scaler.initial(record)
    for _ in range(60):
        overflow = torch.tensor(rng.random() < 0.4)
        eager, program = scaler.advance(record, eager, overflow), traced(program, overflow)
        assert program == eager


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"initial_scale_power": -1}, "initial_scale_power"),
        ({"initial_scale_power": 127}, "initial_scale_power"),
        ({"initial_scale_power": 16.0}, "initial_scale_power"),
        ({"loss_scale_window": 0}, "loss_scale_window"),
        ({"loss_scale_window": True}, "loss_scale_window"),
        ({"hysteresis": 0}, "hysteresis"),
        ({"consecutive_hysteresis": 1}, "consecutive_hysteresis"),
        ({"min_loss_scale": 0}, "min_loss_scale"),
        ({"min_loss_scale": float("nan")}, "min_loss_scale"),
        ({"min_loss_scale": 4.0, "initial_scale_power": 1}, "min_loss_scale"),
        ({"static": 0}, "static"),
        ({"static": -2.0}, "static"),
        ({"static": float("inf")}, "static"),
        ({"window": 5}, "window"),
    ],
)
def test_a_record_that_means_nothing_is_refused(values, where):
    with pytest.raises(PlanError) as caught:
        LossScale(**values)
    assert caught.value.where == where


def test_a_loss_scale_survives_json():
    record = LossScale(hysteresis=3, min_loss_scale=0.1, static=0.5)
    assert LossScale.model_validate_json(record.model_dump_json()) == record
    assert LossScale(**record.model_dump(mode="json")) == record

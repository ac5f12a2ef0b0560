"""`ZGRAPH_DEBUG`: programs that check the layout and the values of what they compute, each time that they run."""

from __future__ import annotations

import os

import pytest
import torch
from sweeps import sweep
from torch import nn
from torch._inductor import config, lowering

import zgraph
from zgraph.codegen import debug_mode, eager
from zgraph.errors import LayoutError, PlanError, WrongValueError


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.GroupNorm(1, 6)

    def forward(self, x):
        return self.g(x.transpose(1, 2)).transpose(1, 2)


class Model(nn.Module):
    """Has a norm of which the gradient's strides are not those promised, random numbers and a buffer that changes.

    (A batch norm's mean of squares hardly depends on what it normalizes, and few rows of bfloat16 hardly differ: both would make
    gradients of rounding errors alone.)
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.middle = nn.Linear(5, 6), Norm(), nn.LayerNorm(6)
        self.last, self.drop, self.batch = Norm(), nn.Dropout(0.5), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.batch(self.drop(self.last(self.middle(self.norm(self.first(x))).sin()))).exp().mean()


class Sine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return (self.w * x).sin().mean()


X = torch.randn(32, 8, 5, generator=torch.Generator().manual_seed(1))


def executables(model: nn.Module) -> list[object]:
    (entry,) = model.zgraph.runtime.entries.values()
    return entry.program().executables()


@sweep("backend", ["eager", "inductor"], quick=(0,))
def test_a_right_program_is_not_accused(backend, monkeypatch):
    monkeypatch.setenv(debug_mode.VARIABLE, "layout, values")
    parts = 2 if backend == "eager" else 1  # (programs of several micro-batches have no other kinds of kernels)
    update = (
        {"optimizer": zgraph.AdamW(lr=1e-2), "grad_clip": 1.0} if backend == "eager" else {"optimizer": zgraph.SGD()}
    )
    plan = zgraph.Plan(backend=backend, micro_batches=parts, **update)
    model = zgraph.compile(Model(), plan)
    for _ in range(3):
        model.train_step(X)
    assert all(isinstance(e.function, debug_mode._Checked) for e in executables(model))


def test_nothing_is_checked_unless_asked_for(monkeypatch):
    monkeypatch.delenv(debug_mode.VARIABLE, raising=False)
    model = zgraph.compile(Model(), zgraph.Plan(backend="eager"))
    model(X).backward()
    assert not any(isinstance(e.function, debug_mode._Checked) for e in executables(model))


def test_a_word_that_means_nothing_is_refused(monkeypatch):
    monkeypatch.setenv(debug_mode.VARIABLE, "layout,valeus")
    with pytest.raises(PlanError, match="valeus") as caught:
        zgraph.compile(Model(), zgraph.Plan(backend="eager"))
    assert "layout, values" in caught.value.hint


@pytest.mark.parametrize(("kinds", "error"), [("layout", LayoutError), ("values", WrongValueError)])
def test_strides_that_are_not_kept_are_found(kinds, error, monkeypatch):
    monkeypatch.setenv(debug_mode.VARIABLE, kinds)
    monkeypatch.setattr(eager, "laid_out", lambda value, strides: value)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(5, 6), Norm(), nn.LayerNorm(6), Norm(), nn.Linear(6, 3))
    loss = zgraph.compile(layers, zgraph.Plan(backend="eager"))(X).square().mean()
    with pytest.raises(error, match=r"train0\.backward") as caught:
        loss.backward()
    assert ("module 2 " if kinds == "layout" else "module 1.g ") in caught.value.where + " "


def test_a_wrong_kernel_is_found(monkeypatch):
    """An operator of Inductor's that computes something else."""
    monkeypatch.setenv(debug_mode.VARIABLE, "values")
    sin, cos = torch.ops.aten.sin.default, torch.ops.aten.cos.default
    monkeypatch.setitem(lowering.lowerings, sin, lowering.lowerings[cos])
    model = zgraph.compile(Sine(), zgraph.Plan())
    with config.patch(fx_graph_cache=False), pytest.raises(WrongValueError) as caught:
        model(X)
    assert "forward" in caught.value.what and "relative error" in caught.value.why


def test_a_written_input_is_compared(monkeypatch):
    """What an update writes is compared as what it gives is."""
    monkeypatch.setenv(debug_mode.VARIABLE, "values")
    model = zgraph.compile(nn.Linear(3, 3), zgraph.Plan(backend="eager", optimizer=zgraph.SGD(lr=0.1)))
    model(torch.ones(2, 3)).sum().backward()
    model.step()
    for chunk in {id(c.executable.function): c.executable.function for c in _chunks(model)}.values():
        monkeypatch.setattr(chunk, "function", _doubling(chunk.function))
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(WrongValueError, match="update"):
        model.step()


def _doubling(function):
    def run(values):
        for value in values:
            value.mul_(2)
        return function(values)

    return run


def _chunks(model: nn.Module) -> list[object]:
    return [c for made in model.zgraph.runtime.updater.programs.compiled() for c in made.executable.chunks]


def train_checked(backend: str, plan: dict) -> list[float]:
    os.environ[debug_mode.VARIABLE] = "layout,values"
    try:
        made = zgraph.Plan(backend=backend, mesh={"dp": 2}, optimizer=zgraph.AdamW(lr=1e-2), grad_clip=1.0, **plan)
        model = zgraph.compile(Model(), made)
        for _ in range(2):
            with model.no_sync():
                model(X).backward()
            model(X).backward()
            model.step()
            model.train_step(X)
        return [float(p.full_tensor().sum()) for p in model.parameters()]
    finally:
        del os.environ[debug_mode.VARIABLE]


PLANS = [
    ("inductor", {"zero": 3}),
    ("eager", {"zero": 1}),
    ("inductor", {"zero": 2, "micro_batches": 2}),
    (
        "eager",
        {"zero": 3, "offload": {"activations": "cpu", "optimizer": "cpu", "parameters": "cpu", "least_bytes": 0}},
    ),
    ("inductor", {"zero": 3, "precision": "bf16"}),
    ("eager", {"zero": 3}),
]


@pytest.mark.parametrize("backend, plan", PLANS)
@pytest.mark.slow
def test_ranks_run_their_collectives_a_second_time(two, backend, plan):
    first, second = two.run(train_checked, backend, plan)
    assert first == second


def forward_with_a_buffer() -> float:
    torch.manual_seed(0)
    plan = zgraph.Plan(backend="eager", mesh={"dp": 2}, zero=3)
    model = zgraph.compile(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)), plan)
    return float(model(torch.ones(4, 5)).sum().detach())


def test_a_buffer_that_changes_beside_sharded_parameters(two):
    assert len(set(two.run(forward_with_a_buffer))) == 1

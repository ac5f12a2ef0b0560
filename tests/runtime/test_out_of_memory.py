"""Out-of-memory errors say where, what lives, and what would have fitted; the real allocator's, in a process with little room."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import zgraph
from zgraph import errors
from zgraph.runtime import out_of_memory
from zgraph.runtime.memory import DeviceMemory


class TooMuch(nn.Module):
    """Asks for 32 TiB in its second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        return (self.second(x).sum() + x.new_ones(2**43)).mean()


class Deep(nn.Module):
    """Its activations are most of what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.parametrize("caught", [torch.OutOfMemoryError, errors.OutOfMemoryError, errors.ZgraphError])
def test_an_allocation_that_fails_is_placed_and_caught_as_torch_has_it(caught):
    model = zgraph.compile(TooMuch(), zgraph.Plan(backend="eager"))
    with pytest.raises(caught) as found:
        model(torch.randn(4, 8))
    error = found.value
    assert "train0.forward, at new_ones of the model itself" in error.what or "ones" in error.what
    assert __file__ in error.where
    assert "the allocator: " in error.why and "DefaultCPUAllocator" in error.why
    assert "nothing of what a plan can change fits" in error.hint
    model.zgraph.runtime.first_gathers.drop()
    with pytest.raises(caught):  # (nothing is left behind: the next call fails as the first)
        model(torch.randn(4, 8))


def failing(monkeypatch, model, batch, room: DeviceMemory) -> errors.OutOfMemoryError:
    """The error of a backward whose last allocation fails in a device with such room."""
    (step,) = model.zgraph.programs.values()
    executable = step.backward()
    function = executable.function

    def fails(values):
        function(values)
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:1] err == 0. DefaultCPUAllocator: can't allocate memory: 1 bytes"
        )

    monkeypatch.setattr(executable, "function", fails)
    monkeypatch.setattr(out_of_memory, "room_of", lambda device: room)
    with pytest.raises(torch.OutOfMemoryError) as found:
        model.train_step(batch)
    return found.value


@pytest.mark.parametrize("share", [0.5, 0.75])
@pytest.mark.slow
def test_what_is_said_to_fit_fits(monkeypatch, share):
    batch = torch.randn(2048, 64)
    plan = zgraph.Plan(backend="eager", optimizer=zgraph.AdamW(lr=1e-3))
    model = zgraph.compile(Deep(), plan, inputs=(batch,))
    forecast = model.zgraph.forecast()
    whole = sum(forecast.programs[0].peak.values())
    error = failing(monkeypatch, model, batch, DeviceMemory(int(whole * share), 0))
    assert f"held besides what the forecast knows: {0} bytes" in error.why
    assert re.search(
        r"activations +tanh\w* float32\[2048, 64\] · the model itself · .*test_out_of_memory.py:\d+", error.why
    )
    lines = error.hint.splitlines()
    assert 2 <= len(lines) <= 4
    budget = int(whole * share * (1 - out_of_memory.FORECAST_ERROR))
    assert f"memory_budget={budget}: " in error.hint
    made = zgraph.compile(Deep(), plan.model_copy(update={"memory_budget": budget}), inputs=(batch,))
    assert sum(made.zgraph.forecast().programs[0].peak.values()) <= budget


def test_a_plan_that_says_what_is_computed_again_is_told_to_let_zgraph_choose(monkeypatch):
    batch = torch.randn(2048, 64)
    model = zgraph.compile(Deep(), zgraph.Plan(backend="eager", recompute="none"), inputs=(batch,))
    whole = sum(model.zgraph.forecast().programs[0].peak.values())
    error = failing(monkeypatch, model, batch, DeviceMemory(whole // 2, 0))
    assert 'recompute="auto", memory_budget=' in error.hint
    assert '"optimizer"' not in error.hint  # (there is none)


@pytest.mark.slow
def test_bytes_that_others_hold_do_not_count_as_room(monkeypatch):
    batch = torch.randn(2048, 64)
    model = zgraph.compile(Deep(), zgraph.Plan(backend="eager"), inputs=(batch,))
    whole = sum(model.zgraph.forecast().programs[0].peak.values())
    error = failing(monkeypatch, model, batch, DeviceMemory(10 * whole, 0))
    assert "held besides what the forecast knows: 0 bytes" not in error.why
    budget = int(re.search(r"memory_budget=(\d+)", error.hint)[1])
    assert budget < whole


class GradientTooLarge(torch.autograd.Function):
    """The same value, whose gradient asks for 32 TiB."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + grad.new_ones(2**43).mean()


@pytest.mark.parametrize(
    "loss_fn",
    [lambda out: out.mean() + out.new_ones(2**43).mean(), lambda out: GradientTooLarge.apply(out.mean())],
    ids=["loss", "its backward"],
)
def test_a_loss_without_room_is_told_as_being_outside_of_the_programs(loss_fn):
    model = zgraph.compile(nn.Linear(4, 4), zgraph.Plan(backend="eager", optimizer=zgraph.SGD(lr=1.0)), loss_fn=loss_fn)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(errors.OutOfMemoryError) as found:
        model.train_step(torch.randn(2, 4))
    assert "outside of train0, in the loss" in found.value.what
    assert "DefaultCPUAllocator" in found.value.why and "the forecast at its peak: " in found.value.why
    assert all(map(torch.equal, before, model.parameters()))


def test_other_errors_stay_as_they_are():
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 4)

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            return self.table(i).sum()

    model = zgraph.compile(Wrong(), zgraph.Plan(backend="eager"))
    with pytest.raises(IndexError):
        model(torch.tensor([7]))


SCRIPT = """
    import resource, sys, torch, zgraph
    from torch import nn

    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))))
    plan = zgraph.Plan(backend=sys.argv[1], optimizer=zgraph.AdamW(lr=1e-3))
    batch = torch.randn(65536, 256)  # (each layer takes 64 MiB or 256)
    model = zgraph.compile(model, plan, inputs=(batch,), loss_fn=lambda out: out.square().mean())
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 64 * 2**20, resource.RLIM_INFINITY))
    try:
        model.train_step(batch)
    except torch.OutOfMemoryError as error:
        print(error)
"""


@pytest.mark.parametrize("backend", [pytest.param("inductor", marks=pytest.mark.inductor), "eager"])
@pytest.mark.slow
def test_a_process_without_room(backend):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), backend], capture_output=True, text=True, timeout=600
    )
    assert "out of memory in train0." in done.stdout, done.stderr[-2000:]
    assert "DefaultCPUAllocator" in done.stdout and "activations" in done.stdout
    said = ("what fits into", "nothing of what a plan can change fits into", "there is no room to try it here")
    assert any(hint in done.stdout for hint in said)

"""zgraph is a guest in the user's process: what it does not own is as it was."""

import gc
import logging
import traceback

import pytest
import torch
from sweeps import sweep
from torch import nn
from torch._dynamo.symbolic_convert import TensorifyState
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim.optimizer import _global_optimizer_post_hooks

import zgraph
from zgraph.errors import CaptureError
from zgraph.parameters.optimizer_steps import _Hook, count_steps_on, steps_on, watch_optimizers
from zgraph.torch_compat.compile_lock import ONE_AT_A_TIME


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_model():
    model = zgraph.compile(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), zgraph.Plan(backend="eager"))
    model(torch.randn(2, 3)).sum().backward()
    return model


@pytest.fixture
def counter():
    return CompileCounterWithBackend("eager")


def test_functions_that_the_user_has_compiled_stay_compiled(counter):
    @torch.compile(backend=counter)
    def own(x):
        return x.sin() + 1

    own(torch.randn(3))
    compiled_model()
    own(torch.randn(3))
    assert counter.frame_count == 1


def test_a_module_that_was_compiled_with_torch_stays_so_beside_one_of_its_class(counter):
    theirs, mine = nn.Linear(3, 3), nn.Linear(3, 3)
    run = torch.compile(theirs, backend=counter)
    run(torch.randn(2, 3))
    mine = zgraph.compile(mine, zgraph.Plan(backend="eager"))
    x = torch.randn(2, 3)
    torch.testing.assert_close(mine(x), nn.functional.linear(x, mine.weight, mine.bias))
    run(torch.randn(2, 3))
    assert counter.frame_count == 1


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(3, 3), 0.5

    def forward(self, x):
        self.scale = self.scale * 0.75
        return self.linear(x) * self.scale


def test_a_float_that_torch_compile_made_a_constant_is_none_here():
    """(Torch remembers which by the names of symbols, which are the same in every model.)"""
    constants = {f"zf{n}" for n in range(9)}
    TensorifyState.force_specializations.update(constants)
    model = zgraph.compile(Scaled(), zgraph.Plan(backend="eager"))
    for scale in (0.375, 0.28125):
        x = torch.randn(2, 3)
        torch.testing.assert_close(model(x), model.linear(x) * scale)
    trace = model.zgraph.runtime.entered.trace
    assert trace.flat.number_inputs == 1
    assert TensorifyState.force_specializations == constants


def test_a_size_that_torch_has_made_dynamic_is_a_number_here():
    model = nn.Linear(3, 3)
    run = torch.compile(model, backend="eager")
    for rows in (2, 5, 7):  # (torch remembers by the code of a frame which sizes change)
        run(torch.randn(rows, 3))
    ours = zgraph.compile(model, zgraph.Plan(backend="eager"))
    for rows in (4, 6):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(ours(x), nn.functional.linear(x, ours.weight, ours.bias))


def test_levels_and_filters_of_loggers_are_as_they_were():
    names = ["", "zgraph", "torch", "torch._subclasses.fake_tensor", "torch._dynamo", "torch._inductor"]
    loggers = [logging.getLogger(name) for name in names]
    before = [(log.level, list(log.filters), list(log.handlers)) for log in loggers]
    compiled_model()
    assert [(log.level, list(log.filters), list(log.handlers)) for log in loggers] == before


class FailsTwice(nn.Module):
    """Forward fails in another way once it has been called."""

    def __init__(self):
        super().__init__()
        self.linear, self.called = nn.Linear(3, 3), []

    def forward(self, x):
        if not self.called:
            if not torch.compiler.is_compiling():
                self.called.append(1)
            raise KeyError("what comes first")
        raise IndexError("what comes next")


@pytest.mark.slow
def test_an_error_of_a_capture_has_those_of_all_attempts():
    model = zgraph.compile(FailsTwice(), zgraph.Plan(backend="eager"))
    with pytest.raises(zgraph.errors.CaptureError, match="can't be captured") as caught:
        model(torch.randn(2, 3))
    lines = FailsTwice.forward.__code__.co_firstlineno + 4, FailsTwice.forward.__code__.co_firstlineno + 5
    told = "".join(traceback.format_exception(caught.value))
    assert all(f'test_guest.py", line {line}, in forward' in told for line in lines)


class Owner:
    """Stands for the shards of a model."""


def test_optimizers_are_watched_only_while_a_sharded_model_lives(monkeypatch):
    hooks = _global_optimizer_post_hooks
    ours, theirs = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    gc.collect()
    monkeypatch.setattr(
        _Hook, "owners", 0
    )  # (a model of a test before may live on, and has a hook then, which counts as well)
    monkeypatch.setattr(_Hook, "handles", ())
    for key in list(hooks):
        monkeypatch.delitem(hooks, key)
    before = dict(hooks)
    first, second = Owner(), Owner()
    for owner in (first, second):
        watch_optimizers(owner)
    assert len(hooks) == len(before) + 1
    count_steps_on(ours)
    ours.grad = theirs.grad = torch.ones(2)
    with_ours, without = torch.optim.SGD([theirs, ours]), torch.optim.SGD([theirs])
    for optimizer in (with_ours, without, with_ours):
        optimizer.step()
    assert steps_on(ours) == 2 and vars(theirs) == {}
    del owner, first
    assert len(hooks) == len(before) + 1
    del second
    assert hooks == before


def test_a_model_that_is_not_sharded_needs_no_hook_on_optimizers():
    before = dict(_global_optimizer_post_hooks)
    model = compiled_model()
    assert _global_optimizer_post_hooks == before and model is not None


@sweep("often, held_back", [(0, 0), (300, 20_000), (100_000, 100_000)], quick=(1,))
def test_the_collector_runs_as_often_as_before_once_a_step_is_compiled(often, held_back):
    class Fails(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x

    before = gc.get_threshold()
    gc.set_threshold(often, 7, 5)
    try:
        with ONE_AT_A_TIME, ONE_AT_A_TIME:
            assert gc.get_threshold() == (held_back, 7, 1000)
        compiled_model()(torch.ones(1, 3)).sum().backward()
        assert gc.get_threshold() == (often, 7, 5)
        with pytest.raises(CaptureError):
            zgraph.compile(Fails(2, 2), zgraph.Plan(backend="eager"))(torch.ones(1, 2))
        assert gc.get_threshold() == (often, 7, 5)
    finally:
        gc.set_threshold(*before)

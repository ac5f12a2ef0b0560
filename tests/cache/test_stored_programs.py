"""A step that another process has made is taken from the cache, and is what it would be if it were made here."""

from __future__ import annotations

import logging

import models
import pytest
import torch
from sweeps import sweep
from torch import nn

import zgraph
from zgraph.build import step_program
from zgraph.capture.capture import Trace
from zgraph.program.digest import digest, node_digests
from zgraph.program.lazy_program import LazyProgram


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ZGRAPH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Net(nn.Module):
    """Dropout, a buffer that is written to, a check, and a parameter that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        x = self.drop(self.norm(self.up(x)))
        torch._assert((x.isfinite()).all(), "not finite")
        return self.up(torch.tanh(x)).square().mean()


PLAN = {"mesh": {"dp": 1}, "zero": 0, "backend": "eager", "optimizer": zgraph.AdamW(lr=0.1)}


def trained(model, inputs, **plan):
    """(losses and gradients of two steps with what they leave, the model)."""
    torch.manual_seed(1)
    zgraph.compile(model, zgraph.Plan(**{**PLAN, **plan}))
    found = []
    for _ in range(2):
        loss = model(**inputs).loss if isinstance(inputs, dict) else model(*inputs)
        loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        model.step()
    return found + [p.detach().clone() for p in model.parameters()] + [b.clone() for b in model.buffers()], model


def net():
    torch.manual_seed(0)
    return Net(), (torch.randn(4, 6),)


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def joints(monkeypatch):
    """The names of the programs that were made from a capture."""
    made = []
    joint = Trace.joint
    monkeypatch.setattr(Trace, "joint", lambda self, *rest: made.append(rest[2]) or joint(self, *rest))
    return made


@sweep("name", ["gpt2", "t5"], quick={0})
def test_a_kept_step_gives_the_same_numbers_bit_for_bit_and_nothing_is_traced(name, cache, joints):
    def build():
        torch.manual_seed(0)
        case = models.build(name)
        return case.model, case.inputs

    cold, _ = trained(*build())
    assert joints == ["train0"]
    warm, model = trained(*build())
    assert joints == ["train0"]
    assert same(cold, warm)
    (step,) = model.zgraph.programs.values()
    assert isinstance(step.captured, LazyProgram) and not step.captured.is_made


def test_what_a_kept_step_says_is_what_a_new_one_says(cache, joints):
    cold, first = trained(*net())
    warm, second = trained(*net())
    assert same(cold, warm) and joints == ["train0"]
    (made,), (kept,) = first.zgraph.programs.values(), second.zgraph.programs.values()
    fields = ("random", "keeps", "offloaded", "reached", "mutated", "differentiated", "read_late", "choice", "pattern")
    for field in fields:
        assert getattr(made, field) == getattr(kept, field), field
    assert made.random and made.mutated
    for ours, theirs in zip(made.executables(), kept.executables(), strict=True):
        assert ours.program.inputs == theirs.program.inputs and ours.program.outputs == theirs.program.outputs
        assert digest(ours.program) == digest(theirs.program) and ours.edge == theirs.edge
        assert ours.program.params == theirs.program.params and ours.program.facts == theirs.program.facts
        assert node_digests(ours.program) == node_digests(theirs.program)
    assert [r.name for r in made.history().records] == [r.name for r in kept.history().records]
    assert digest(made.history().program) == digest(kept.history().program)
    assert joints == ["train0", "train0"]


def test_variants_that_are_made_later_are_kept_as_well(cache, joints):
    def accumulated():
        model, inputs = net()
        torch.manual_seed(1)
        zgraph.compile(model, zgraph.Plan(**PLAN))
        with model.no_sync():
            model(*inputs).backward()
        model(*inputs).backward()
        return [p.grad.clone() for p in model.parameters()]

    assert same(accumulated(), accumulated())
    assert joints == ["train0"]


def test_a_kept_program_that_is_another_is_refused_when_somebody_looks(cache, monkeypatch):
    trained(*net())
    _, model = trained(*net())
    (step,) = model.zgraph.programs.values()
    joint = Trace.joint

    def other(self, *rest):
        program = joint(self, *rest)
        node = next(n for n in program.graph.nodes if n.target is torch.ops.aten.tanh.default)
        node.target = torch.ops.aten.sin.default
        return program

    monkeypatch.setattr(Trace, "joint", other)
    with pytest.raises(zgraph.errors.ZgraphError, match="another than the one that was kept"):
        step.history()


def test_warnings_are_given_again(cache, monkeypatch, caplog):
    run_passes = step_program.run_passes

    def warns(*args, **kwargs):
        logging.getLogger("zgraph.passes.some").warning("slow: %s", "a pass")
        return run_passes(*args, **kwargs)

    monkeypatch.setattr(step_program, "run_passes", warns)
    trained(*net())
    assert caplog.messages.count("slow: a pass") == 1
    monkeypatch.setattr(step_program, "run_passes", run_passes)
    trained(*net())
    assert caplog.messages.count("slow: a pass") == 2


def test_what_is_refused_is_refused_again(cache, joints):
    class Doubles(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            self.weight.data = self.weight * 2
            return (x * self.weight).sum()

    for _ in range(2):
        with pytest.raises(zgraph.errors.ZgraphError):
            trained(Doubles(), (torch.ones(2),))
    with pytest.raises(zgraph.errors.PlanError):
        trained(*net(), memory_budget=1)
    with pytest.raises(zgraph.errors.PlanError):
        trained(*net(), memory_budget=1)
    assert not list(cache.glob("programs/*/*-step.kept"))


def test_nothing_is_kept_where_no_folder_is_named(tmp_path, monkeypatch, joints):
    monkeypatch.delenv("ZGRAPH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trained(*net())
    trained(*net())
    assert joints == ["train0", "train0"] and not (tmp_path / "zgraph" / "programs").exists()

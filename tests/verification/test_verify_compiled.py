"""`zgraph.verify(…, compiled=True)` finds nothing in right code, and each planted fault, at the place where it begins."""

from __future__ import annotations

import pytest
import torch
from sweeps import sweep
from torch import nn
from torch.nn import functional as F

import zgraph
from zgraph.api import compiled_training
from zgraph.errors import MeshError, RankMismatchError, UnsupportedError
from zgraph.parameters.shards import Shards
from zgraph.runtime import runtime

Plan = zgraph.Plan
ADAMW = zgraph.AdamW(lr=1e-2)


class Sum(nn.Module):
    """Two parameters with one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x + self.p + self.q


class Net(nn.Module):
    """Buffers, random numbers, and a parameter that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.last = nn.Linear(8, 6)

    def forward(self, x):
        x = self.last(self.drop(torch.tanh(self.norm(self.first(x)))))
        return self.last(torch.tanh(self.first(x)))


class Words(nn.Module):
    """A loss inside, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.up, self.down = (
            nn.Embedding(32, 16),
            nn.LayerNorm(16),
            nn.Linear(16, 32),
            nn.Linear(32, 16),
        )
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words, targets):
        x = self.embed(words)
        x = self.norm(x + self.down(torch.tanh(self.up(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def square(output):
    return output.square().mean()


def seeded(made, *args):
    torch.manual_seed(0)
    return made(*args)


def verify(model, plan, rows=8, width=6):
    torch.manual_seed(1)
    return zgraph.verify(model, plan, 1, (torch.randn(rows, width),), square, compiled=True)


# -- right code ------------------------------------------------------------------------------------------------------
@sweep(
    "plan",
    [
        Plan(backend="eager"),
        Plan(backend="eager", optimizer=ADAMW, grad_clip=0.1, ema=0.9),
        Plan(backend="eager", precision="bf16"),
    ],
    ids=["own optimizer", "plan's optimizer", "bf16"],
    quick=2,
)
def test_right_code_is_the_plain_model(plan):
    model = seeded(Net)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    found = zgraph.verify(model, plan, 1, (x,), square, compiled=True)
    assert found.ok and found.compiled and found.first is None, str(found)
    assert {"output", "loss", "buffer", "gradient", "norm", "parameter"} <= {d.what for d in found.differences}
    assert ("state" in {d.what for d in found.differences}) == (plan.optimizer is not None)
    phases = list(dict.fromkeys(d.phase for d in found.differences))
    assert (
        phases[:3] == ["step 1, forward 1", "step 1, backward 1", "step 1, forward 2"]
        and phases[-1] == "step 4, update"
    )
    assert found.plan.micro_batches == 2
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.inductor
def test_inductors_code_is_the_plain_model_but_for_rounding():
    found = verify(seeded(nn.Linear, 6, 6), Plan())
    assert found.ok, str(found)


@pytest.mark.inductor
@pytest.mark.slow
def test_inductors_code_is_the_plain_model_with_its_buffers_and_updates():
    found = verify(seeded(Net), Plan(optimizer=ADAMW))
    assert found.ok, str(found)


# -- planted faults --------------------------------------------------------------------------------------------------
def begins(found, phase, what, name=""):
    """What is found first is this, and it is said first."""
    assert not found.ok
    first = found.first
    assert (first.phase, first.what) == (phase, what) and name in first.name, str(found)
    assert str(first) in str(found).splitlines()[1]


def test_one_storage_handed_out_twice_is_found(monkeypatch):
    made, held = Shards.gradient, {}

    def again(self, name, value, *, partial=False):
        if name == "p":
            held["p"] = made(self, name, value, partial=partial)
        return held["p"].detach()

    monkeypatch.setattr(Shards, "gradient", again)
    begins(verify(seeded(Sum), Plan(backend="eager"), width=4), "step 1, backward 2", "gradient")


def test_a_tangent_that_is_written_to_is_found(monkeypatch):
    made = runtime.Runtime.run_backward

    def writes(self, step, saved, flat, tangents, kept, **options):
        found = made(self, step, saved, flat, tangents, kept, **options)
        for tangent in tangents.values():
            tangent.mul_(2)
        return found

    monkeypatch.setattr(runtime.Runtime, "run_backward", writes)
    found = verify(seeded(Sum), Plan(backend="eager"), width=4)
    begins(found, "step 1, backward 2", "tangent of", "output")


def test_strides_that_are_off_are_found(monkeypatch):
    made = runtime.Runtime.run_backward

    def off(self, step, saved, flat, tangents, kept, **options):
        turned = {i: t.t() if t.shape == (6, 6) else t for i, t in tangents.items()}
        return made(self, step, saved, flat, turned, kept, **options)

    monkeypatch.setattr(runtime.Runtime, "run_backward", off)
    begins(verify(seeded(Net), Plan(backend="eager"), rows=6), "step 1, backward 1", "gradient")


def test_a_stale_weight_is_found(monkeypatch):
    made, held = Shards.local, {}
    monkeypatch.setattr(Shards, "local", lambda self, name: held.setdefault(name, made(self, name).clone()))
    begins(verify(seeded(Net), Plan(backend="eager")), "step 2, forward 1", "output")


@pytest.mark.slow
def test_a_lost_hook_of_a_parameter_is_found(monkeypatch):
    def loses(model, *args, **kwargs):
        for param in model.parameters():
            param._backward_hooks = None
        return zgraph.compile(model, *args, **kwargs)

    def hooked():
        model = seeded(Net)
        model.last.bias.register_hook(lambda grad: grad * 0.5)
        return model

    assert verify(hooked(), Plan(backend="eager")).ok
    monkeypatch.setattr(compiled_training, "compile", loses)
    begins(verify(hooked(), Plan(backend="eager")), "step 1, backward 1", "gradient", "last.bias")


def test_a_dropped_guard_is_found(monkeypatch):
    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.turn = nn.Linear(6, 6), 1
            self.register_forward_pre_hook(lambda module, args: setattr(module, "turn", module.turn % 3 + 1))

        def forward(self, x):
            return self.layer(x) * self.turn

    assert verify(seeded(Turning), Plan(backend="eager")).ok
    monkeypatch.setattr("zgraph.torch_compat.guards.Guards.failing", lambda self, *_: None)
    begins(verify(seeded(Turning), Plan(backend="eager")), "step 1, forward 2", "output")


# -- what is refused -------------------------------------------------------------------------------------------------
def test_more_ranks_than_processes_are_refused():
    with pytest.raises(MeshError, match="torchrun --nproc-per-node 4"):
        zgraph.verify(Net(), Plan(), 4, (torch.randn(8, 6),), square, compiled=True)


def test_late_updates_are_refused_by_name():
    plan = Plan(optimizer=ADAMW, offload={"optimizer": "cpu", "delayed_after": 1})
    with pytest.raises(UnsupportedError, match=r"offload\.delayed_after"):
        zgraph.verify(Net(), plan, 1, (torch.randn(8, 6),), square, compiled=True)


# -- real ranks ------------------------------------------------------------------------------------------------------
REAL = {
    "dp": {"zero": 3, "optimizer": ADAMW, "grad_clip": 0.5},
    "zero 0": {"zero": 0, "loss_average": "token"},
    "tp": {"mesh": {"tp": 2}, "optimizer": ADAMW},
    "cp": {"mesh": {"cp": 2}},
    "pp": {"mesh": {"pp": 2}, "micro_batches": 2},
    "pp and an optimizer": {"mesh": {"pp": 2}, "micro_batches": 2, "optimizer": ADAMW, "grad_clip": 0.5},
}


def on_rank(kind, fault):
    words = torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(1))
    if fault == "other batch":
        words = words + torch.distributed.get_rank() * (words < 31)
    if fault == "another rank's shard":
        made = Shards.local
        wrong = torch.distributed.get_rank() == 1
        Shards.local = lambda self, name: (
            made(self, name).flip(0) if wrong and name == "up.weight" else made(self, name)
        )
    try:
        inputs = {"words": words, "targets": words.roll(1, 1)}
        found = zgraph.verify(seeded(Words), Plan(backend="eager", **REAL[kind]), 2, inputs, compiled=True)
    finally:
        if fault == "another rank's shard":
            Shards.local = made
    return found.ok, str(found), found.first and (found.first.phase, found.first.what)


@pytest.mark.gloo
@pytest.mark.parametrize("kind", list(REAL))
@pytest.mark.slow
def test_real_ranks_are_the_plain_model(two, kind):
    first, second = two.run(on_rank, kind, None)
    assert first[0], first[1]
    assert first == second and "2 real ranks, compiled" in first[1]


@pytest.mark.gloo
@pytest.mark.slow
def test_another_ranks_shard_is_found_on_every_rank(two):
    for ok, text, first in two.run(on_rank, "dp", "another rank's shard"):
        assert not ok and first[0] == "step 1, forward 1", text


@pytest.mark.gloo
def test_ranks_with_other_batches_are_refused(two):
    for outcome in two.attempt(on_rank, "dp", "other batch", keep=True):
        assert isinstance(outcome.error, RankMismatchError) and "different batches" in str(outcome.error)

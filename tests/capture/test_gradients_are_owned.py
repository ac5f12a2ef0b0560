"""Each gradient that a backward hands out has memory of its own: what is added to one, or done to it in place, reaches nothing else."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import pytest
import torch
from ranks import Ranks
from sweeps import sweep
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

import zgraph


class Deltas(nn.Module):
    """A weight with a change, and a bias in two parts: their gradients are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.d = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.zeros(3, 4))
        self.flat = nn.Parameter(torch.zeros(12))
        self.p, self.q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (linear(x, self.w + self.d + self.flat.view(3, 4)) + self.p + self.q).square().mean()


class Parallel(nn.Module):
    """Two branches beside the residual, as of GPT-J."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(x + self.one(torch.tanh(x)) + self.other(torch.relu(x))).square().mean()


class Expanded(nn.Module):
    """A gradient that is one number, seen many times."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return (x @ self.w).square().mean() + self.b.sum()


class Positions(nn.Module):
    """Without a loss: the tangent that comes in is the gradient of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.b, self.c = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4, 4))

    def forward(self, x):
        return x @ self.w + self.b + self.c


MODELS = (Deltas, Parallel, Expanded)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def made(kind, **plan):
    torch.manual_seed(0)
    return zgraph.compile(kind(), zgraph.Plan(**plan))


def batch(number, rank=0):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(100 * rank + number))


def reference(kind, calls, world=1):
    """The plain model with the sum of its gradients, made by hand: plain accumulation is wrong itself for `d + flat.view(…)`."""
    torch.manual_seed(0)
    model = kind()
    params = list(model.parameters())
    for p in params:
        p.grad = torch.zeros_like(p)
    for rank in range(world):
        for number in calls:
            tangent = batch(10 + number, rank) if kind is Positions else None
            for p, g in zip(params, torch.autograd.grad(model(batch(number, rank)), params, tangent), strict=True):
                p.grad += g / world
    return model


def wrong(model, plain):
    """The names of the parameters whose gradients are not those of the plain model."""
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    return [n for (n, p), q in pairs if not torch.allclose(whole(p.grad), q.grad, rtol=1e-5, atol=1e-6)]


def accumulated(kind, backend, zero, rank=0, world=1):
    """Which gradients are wrong: after two backward passes, after accumulation, clipping and a write by hand."""
    found = []
    model = made(kind, backend=backend, zero=zero)
    for number in (0, 1):
        model(batch(number, rank)).backward()
    plain = reference(kind, (0, 1), world)
    found += [f"two backward passes: {n}" for n in wrong(model, plain)]
    for m in (model, plain):
        torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
        for p in m.parameters():
            p.grad.mul_(3)
    found += [f"clipped and scaled: {n}" for n in wrong(model, plain)]
    model.zero_grad()
    with model.no_sync():
        model(batch(0, rank)).backward()
        model(batch(1, rank)).backward()
    model(batch(2, rank)).backward()
    found += [f"no_sync: {n}" for n in wrong(model, reference(kind, (0, 1, 2), world))]
    return found


def trained(kind, backend, zero, rank=0, world=1):
    """Which gradients are wrong in a step of four micro-batches."""
    model = made(kind, backend=backend, zero=zero, micro_batches=4)
    model.train_step(batch(0, rank))
    return [f"micro-batches: {n}" for n in wrong(model, reference(kind, (0,), world))]


def everything(backend, zero):
    """On one rank of a group: what is wrong, of all models."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return [
        (kind.__name__, *found)
        for kind in MODELS
        if (found := accumulated(kind, backend, zero, rank, world) + trained(kind, backend, zero, rank, world))
    ]


def tangents(backend, zero, sync):
    """What is wrong where the user's own tensor is the gradient of parameters, and whether it was written to."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    model = made(Positions, backend=backend, zero=zero)
    given = [batch(10 + number, rank) for number in range(3)]
    before = copy.deepcopy(given)
    for number, tangent in enumerate(given):
        with contextlib.nullcontext() if sync or number == 2 else model.no_sync():
            model(batch(number, rank)).backward(tangent)
    plain = reference(Positions, range(3), world)
    return wrong(model, plain) + [i for i, (a, b) in enumerate(zip(given, before, strict=True)) if not a.equal(b)]


@pytest.fixture(scope="module")
def one() -> Iterator[Ranks]:
    with Ranks(1) as ranks:
        yield ranks


@pytest.mark.parametrize("kind", MODELS)
def test_equal_gradients_are_two_tensors(kind):
    assert accumulated(kind, "eager", 3) + trained(kind, "eager", 3) == []


@pytest.mark.inductor
@sweep("kind", [Deltas, Parallel], quick=1)
def test_equal_gradients_are_two_tensors_where_the_backend_merges_them(kind):
    assert accumulated(kind, "inductor", 3) == []


@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.parametrize("kind", [Deltas, Parallel])
def test_micro_batches_have_gradients_of_their_own_where_the_backend_merges_them(kind):
    assert trained(kind, "inductor", 3) == []


@pytest.mark.gloo
@sweep("zero", [0, 3], quick=(0,))
def test_a_group_of_one_rank_hands_out_owned_gradients(one, zero):
    assert one.run(everything, "eager", zero) == [[]]
    assert one.run(tangents, "eager", zero, True) == [[]]


@pytest.mark.gloo
@sweep("zero", [0, 1, 2, 3], quick=1)
def test_ranks_hand_out_owned_gradients(two, zero):
    assert two.run(everything, "eager", zero) == [[], []]
    assert two.run(tangents, "eager", zero, False) == [[], []]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_the_users_tangent_is_not_written_to(backend):
    assert tangents(backend, 3, True) == []


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_gradients_of_inputs_and_buffers_are_owned_too(backend):
    """`x + buffer + p`: one value is the gradient of an input, of a buffer and of a parameter."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.ones(4, 4))
            self.register_buffer("b", torch.ones(4, 4).requires_grad_())

        def forward(self, x, y):
            return (x + y + self.p + self.b).square().mean()

    plain = Sum()
    model = zgraph.compile(Sum(), zgraph.Plan(backend=backend))
    for m in (plain, model):
        x, y = batch(0).requires_grad_(), batch(1).requires_grad_()
        for _ in range(2):
            m(x, y).backward()
        x.grad.mul_(2)
        m.leaves = [x, y, m.p, m.b]
    for mine, its in zip(model.leaves, plain.leaves, strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


def test_a_gradient_that_is_kept_is_not_written_to():
    """With retain_graph the values that a backward reads are there for the next one."""

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return (self.w * torch.tanh(x)).sum()

    torch.manual_seed(0)
    plain = Square()
    model = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(backend="eager"))
    for m in (plain, model):
        loss = m(batch(0))
        for _ in range(3):
            loss.backward(retain_graph=True)
            m.w.grad.mul_(2)
    torch.testing.assert_close(model.w.grad, plain.w.grad)

"""Gradients that wait to be reduced are added by backward passes that add to `.grad`, and by no others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from sweeps import product
from torch import nn
from torch.distributed.tensor import DTensor

import zgraph

pytestmark = pytest.mark.gloo


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def batch(number, rank):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(100 * rank + number))


def reference(calls):
    """The mean over two ranks of the gradients of the batches of these numbers, by name."""
    model = net()
    for rank in range(2):
        for number in calls:
            (model(batch(number, rank)).square().mean() / 2).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def wrong(found, calls):
    return [n for n, g in reference(calls).items() if not torch.allclose(whole(found[n]), g, rtol=1e-5, atol=1e-7)]


def gradients(model):
    return {n: p.grad for n, p in model.named_parameters()}


def asked(zero, first):
    """`torch.autograd.grad` while gradients wait: what it returns is its own, and those that wait go on to."""
    rank = dist.get_rank()
    model = zgraph.compile(net(), zgraph.Plan(backend="eager", zero=zero))
    with model.no_sync():
        model(batch(0, rank)).square().mean().backward()
    named = dict(model.named_parameters())
    some = dict(list(named.items())[:first])
    loss = model(batch(1, rank)).square().mean()
    returned = dict(zip(some, torch.autograd.grad(loss, list(some.values())), strict=True))
    found = [n for n in wrong({**reference((1,)), **returned}, (1,))]
    model(batch(2, rank)).square().mean().backward()
    return found + wrong(gradients(model), (0, 2))


def of_some(zero):
    """`backward(inputs=…)` adds to these parameters alone."""
    rank = dist.get_rank()
    model = zgraph.compile(net(), zgraph.Plan(backend="eager", zero=zero))
    with model.no_sync():
        model(batch(0, rank)).square().mean().backward()
    model(batch(1, rank)).square().mean().backward(inputs=[model[0].weight])
    both, first = reference((0, 1)), reference((0,))
    expected = {n: both[n] if n == "0.weight" else first[n] for n in both}
    return [n for n, g in gradients(model).items() if not torch.allclose(whole(g), expected[n], rtol=1e-5, atol=1e-7)]


@product("zero, first", [0, 1, 3], [1, 4], together=1)
def test_autograd_grad_leaves_waiting_gradients_alone(two, zero, first):
    assert two.run(asked, zero, first) == [[], []]


@pytest.mark.parametrize("zero", [0, 2])
def test_a_backward_of_some_parameters_adds_to_these(two, zero):
    assert two.run(of_some, zero) == [[], []]

"""What a loss outside of the model computes of whole weights has the gradients that plain PyTorch's mean of all ranks' losses has."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import zgraph
from zgraph.errors import ModelError


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def squares(model):
    return sum(p.square().sum() for p in model.parameters())


LOSSES = {
    "penalty": lambda model, y: y.square().mean() + 0.1 * whole(squares(model)),
    "factor of the rows' loss": lambda model, y: y.square().mean() * whole(squares(model)),
    "weight beside the rows": lambda model, y: F.linear(y, whole(model[2].weight).T).sin().mean(),
}


def built():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def furthest(zero):
    """The largest relative difference of a gradient, by the loss; each rank has rows of its own."""
    rows = [torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    model, found = zgraph.compile(built(), zgraph.Plan(zero=zero, backend="eager")), {}
    for name, loss in LOSSES.items():
        plain = built()
        for x in rows:
            (loss(plain, plain(x)) / 2).backward()
        loss(model, model(rows[dist.get_rank()])).backward()
        pairs = [(whole(p.grad), q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)]
        found[name] = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        model.zero_grad()
    part = model[0].weight.to_local()
    (part.sum() * (1 + dist.get_rank())).backward()
    of_part = model[0].weight.grad.to_local()
    assert (of_part == (1.5 if zero == 0 else 1 + dist.get_rank())).all()  # (a part is a rank's own)
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_gradients_are_those_of_the_mean_of_all_losses(two, zero):
    for found in two.run(furthest, zero):
        assert max(found.values()) < 2e-6, found  # (float32's rounding)


def beside_plain(zero):
    model = zgraph.compile(built(), zgraph.Plan(zero=zero, backend="eager"))
    try:
        (torch.ones(2, 6) @ model[0].weight.T).sum().backward()
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.gloo
@pytest.mark.parametrize("zero", [0, 3])
def test_a_plain_tensor_beside_a_weight_that_learns_is_refused(two, zero):
    for said in two.run(beside_plain, zero):
        assert "mm takes a plain tensor beside" in said and "take full_tensor() of the one of" in said


def of_functions(zero):
    """Gradients of weights that are given as functions of them (a step of MAML), beside plain PyTorch's."""
    x, found = torch.randn(4, 6, generator=torch.Generator().manual_seed(3)), []
    for model in (built(), zgraph.compile(built(), zgraph.Plan(zero=zero, backend="eager"))):
        weights = dict(model.named_parameters())
        first = torch.autograd.grad(
            torch.func.functional_call(model, weights, (x,)).square().mean(), list(weights.values())
        )
        moved = {name: 2 * w - 0.1 * g for (name, w), g in zip(weights.items(), first, strict=True)}
        torch.func.functional_call(model, moved, (x,)).square().mean().backward()
        found.append([whole(p.grad) for p in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.gloo
@pytest.mark.parametrize("zero", [0, 3])
def test_functions_of_weights_hand_gradients_on_to_them(two, zero):
    assert two.run(of_functions, zero) == [True, True]

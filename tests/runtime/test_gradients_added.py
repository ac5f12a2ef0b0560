"""What backwards give is added to `.grad` by one operator for all parameters, as autograd adds it.

Functions at the top of this file run on the ranks.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from sweeps import sweep
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import zgraph

pytestmark = pytest.mark.gloo


class Net(nn.Module):
    """Weights of uneven and even rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 5), nn.Linear(5, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x))))).square().mean()


class Seen(TorchDispatchMode):
    """How many operators there are on DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def pair(zero: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Net().double()
    model = Net().double()
    model.load_state_dict(plain.state_dict())
    return zgraph.compile(model, zgraph.Plan(zero=zero, backend="eager", hardware="default")), plain


def losses(model: nn.Module, plain: nn.Module, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    batches = [torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * number + r)).double() for r in range(2)]
    return model(batches[dist.get_rank()]), torch.stack([plain(x) for x in batches]).mean()


def compare(model: nn.Module, plain: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-12, atol=1e-14, msg=name)


def several(zero: int, held: bool) -> int:
    """Three backwards, of which the first two may only accumulate; how many operators on DTensors autograd ran in the third."""
    model, plain = pair(zero)
    for number in range(3):
        mine, theirs = losses(model, plain, number)
        seen = Seen()
        with seen:
            if held and number < 2:
                with model.no_sync():
                    mine.backward()
            else:
                mine.backward()
        theirs.backward()
    compare(model, plain)
    return len([name for name in seen.found if "add" in name])


@sweep("zero, held", [(z, h) for z in range(4) for h in (False, True)], quick=1)
def test_gradients_of_several_backwards(two, zero, held):
    assert two.run(several, zero, held) == [0, 0]


def unusual(zero: int) -> None:
    """A hook on one parameter, a loss of another graph, only some inputs, a gradient that the user holds, or has put there."""
    model, plain = pair(zero)
    seen: list[list[torch.Tensor]] = [[], []]
    for found, one in zip(seen, (model, plain), strict=True):
        one.second.weight.register_hook(lambda g, found=found: found.append(g) or g * 2)
    for number in range(2):
        for loss, one in zip(losses(model, plain, number), (model, plain), strict=True):
            other = one.first.weight.sum() * 3
            (loss + (other.full_tensor() if isinstance(other, DTensor) else other)).backward()
    compare(model, plain)
    assert len(seen[0]) == len(seen[1]) == 2
    held = model.first.weight.grad
    for loss, one in zip(losses(model, plain, 2), (model, plain), strict=True):
        loss.backward(inputs=[one.first.weight, one.third.bias])
    compare(model, plain)
    assert held is model.first.weight.grad
    for one in (model, plain):
        one.first.weight.grad = one.first.weight.detach().clone()
        one.first.bias.grad = None
    for loss in losses(model, plain, 3):
        loss.backward()
    compare(model, plain)
    got = [
        torch.autograd.grad(loss, list(one.parameters()))
        for loss, one in zip(losses(model, plain, 4), (model, plain), strict=True)
    ]
    for mine, theirs in zip(*got, strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-12, atol=1e-14)
    compare(model, plain)


@sweep("zero", range(4), quick=(0, 3))
def test_unusual_gradients(two, zero):
    two.run(unusual, zero)

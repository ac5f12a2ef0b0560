"""torch's optimizers in a loop of one's own update shards as they update whole weights; one that can't is refused by a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn, optim
from torch.distributed.tensor import DTensor

import zgraph
from zgraph.errors import ModelError

X = torch.arange(24.0).reshape(4, 6) / 10


class Mapped(optim.Optimizer):
    """Writes numbers where a mask says so, and divides by a sum in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            sizes = p.grad.norm(dim=-1, keepdim=True).square_().add_(1e-3)
            p.sub_(p.grad / sizes.mean(), alpha=1e-3)
            p[p.abs() < 0.05] = 0.01
            p.grad.masked_fill_(p.grad > 1e-2, 0.0)


OPTIMIZERS: dict[str, Any] = {
    "Rprop": lambda p: optim.Rprop(p, 1e-3, foreach=False),
    "Rprop of several": lambda p: optim.Rprop(p, 1e-3, foreach=True),
    "Adafactor": lambda p: optim.Adafactor(p, 1e-2),
    "Adafactor of several": lambda p: optim.Adafactor(p, 1e-2, foreach=True),
    "ASGD": lambda p: optim.ASGD(p, 1e-2, foreach=False),
    "ASGD of several": lambda p: optim.ASGD(p, 1e-2, foreach=True),
    "NAdam": lambda p: optim.NAdam(p, 1e-2, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": lambda p: optim.RAdam(p, 1e-2),
    "Adamax": lambda p: optim.Adamax(p, 1e-2),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Adagrad": lambda p: optim.Adagrad(p, 1e-2),
    "RMSprop": lambda p: optim.RMSprop(p, 1e-2, centered=True, momentum=0.5),
    "Adam": lambda p: optim.Adam(p, 1e-2, amsgrad=True),
    "AdamW, fused": lambda p: optim.AdamW(p, 1e-2, fused=True),
    "SGD, fused": lambda p: optim.SGD(p, 1e-2, momentum=0.9, fused=True),
    "Adagrad, fused": lambda p: optim.Adagrad(p, 1e-2, fused=True),
    "AdamW, a tensor's rate": lambda p: optim.AdamW(p, torch.tensor(1e-2), foreach=False),
    "SGD": lambda p: optim.SGD(p, 1e-2, momentum=0.9, nesterov=True),
    "SGD, maximized": lambda p: optim.SGD(p, 1e-3, maximize=True, foreach=True),
    "Mapped": Mapped,
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))


def loss_of(made: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (made(x) * torch.arange(5)).square().mean()


def updated(made: nn.Module, x: torch.Tensor, name: str, first: list[torch.Tensor]) -> Any:
    """The whole weights after three steps from the first ones; or the error."""
    params = list(made.parameters())
    with torch.no_grad():
        for p, value in zip(params, first, strict=True):
            p.copy_(value)
    optimizer = OPTIMIZERS[name](params)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(made, x).backward()
        try:
            optimizer.step()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach().clone() for p in params]


def all_updated(zero: int | None) -> dict[str, Any]:
    made, x = model(), X
    if zero is not None:
        zgraph.compile(made, zgraph.Plan(backend="eager", zero=zero))
        x = X.chunk(dist.get_world_size())[dist.get_rank()]
    first = [p.detach().clone() for p in made.parameters()]
    return {name: updated(made, x, name, first) for name in OPTIMIZERS}


@pytest.mark.gloo
@pytest.mark.parametrize("zero", [3, pytest.param(1, marks=pytest.mark.slow), pytest.param(0, marks=pytest.mark.slow)])
def test_an_optimizer_updates_shards_as_whole_weights(two: Ranks, zero):
    plain = all_updated(None)
    for mine in two.run(all_updated, zero):
        assert {name: error for name, error in mine.items() if isinstance(error, str)} == {}
        for name, expected in plain.items():
            torch.testing.assert_close(mine[name], expected, rtol=1e-5, atol=1e-6, msg=name)


def of_one_vector(zero: int | None) -> list[float]:
    made = model() if zero is None else zgraph.compile(model(), zgraph.Plan(backend="eager", zero=zero))
    optimizer = optim.LBFGS(made.parameters(), 0.1, max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(made, X)
        loss.backward()
        return loss

    return [float(optimizer.step(closure)) for _ in range(3)]


def refused() -> None:
    with pytest.raises(ModelError, match="LBFGS can't update weights that are divided") as caught:
        of_one_vector(3)
    assert "zero=0" in str(caught.value)
    assert of_one_vector(0) == pytest.approx(of_one_vector(None), rel=1e-5)


@pytest.mark.gloo
def test_one_of_one_vector_is_refused_where_weights_are_divided(two: Ranks):
    two.run(refused)

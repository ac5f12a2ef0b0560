"""Operators on divided tensors give what they give for whole ones, beside plain tensors too, or are refused by a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import zgraph
from zgraph.errors import ModelError

Use = Callable[[Any], Any]
ROWS = torch.tensor([1, 6])
WRITES: dict[str, Use] = {
    "copied": lambda w: w.copy_(torch.arange(49.0).view(7, 7)),
    "a mask": lambda w: w.masked_fill_(torch.eye(7).bool(), 0.0).mul_(torch.ones(7, 7).tril()),
    "noise": lambda w: w.add_(torch.randn(w.shape), alpha=0.1),
    "towards": lambda w: w.lerp_(torch.ones(7, 7), 0.3),
    "out": lambda w: torch.mul(w, torch.full((7, 7), 2.0), out=w),
    "rows filled": lambda w: w.index_fill_(0, ROWS, 0.0),
    "columns filled": lambda w: w.index_fill_(1, ROWS, 0.0),
    "rows copied": lambda w: w.index_copy_(0, ROWS, torch.ones(2, 7)),
    "rows added": lambda w: w.index_add_(0, ROWS, torch.ones(2, 7)),
    "rows set": lambda w: w.__setitem__(ROWS, 0.0),
    "columns set": lambda w: w.__setitem__((slice(None), ROWS), 0.0),
    "rows added twice": lambda w: w.index_put_((torch.tensor([1, 1]),), torch.ones(2, 7), accumulate=True),
    "scattered": lambda w: w.scatter_(0, torch.full((1, 7), 5), 1.0),
    "scattered sums": lambda w: w.scatter_add_(0, torch.full((1, 7), 5), torch.ones(1, 7)),
    "of a mask": lambda w: w.masked_scatter_(torch.eye(7).bool(), torch.arange(7.0)),
    "put": lambda w: w.put_(torch.tensor([1, 40]), torch.zeros(2)),
    "triangles": lambda w: w.tril_().triu_(-2),
    "renormed": lambda w: w.renorm_(2, 0, 0.5),
    "integers": lambda w: (w.random_(5), w.random_(2, 9).sum(), torch.empty_like(w).random_())[2],
    "by a weight": lambda w: w.bernoulli_(w.sigmoid()),
    "sparse": lambda w: nn.init.sparse_(w, 0.4),
    "truncated": lambda w: nn.init.trunc_normal_(w, std=0.3, a=-0.2, b=0.2),
    "orthogonal": lambda w: nn.init.orthogonal_(w),
}
READS: dict[str, Use] = {
    "normal": lambda w: (torch.normal(w, w.abs()), torch.normal(w, 1.0), torch.normal(0.0, w.abs())),
    "rows": lambda w: torch.stack([row * 2 for row in w]) + sum(row.sum() for row in w),
    "flat": lambda w: (w.view(-1), w.flatten(), w.reshape(49, 1), nn.utils.parameters_to_vector([w])),
    "where true": lambda w: (w[w > 0], w.masked_select(w > 0), (w > 0).nonzero(), w.unique()),
    "renormed": lambda w: (torch.renorm(w, 2, 0, 0.5), torch.cdist(w, w), w.quantile(0.3), w.unfold(0, 2, 2)),
    "means": lambda w: [loss(w.sigmoid(), torch.zeros_like(w)) for loss in LOSSES],
}
BESIDE_PLAIN: dict[str, Use] = {
    "a sum": lambda w: w + torch.eye(7),
    "a choice": lambda w: torch.where(torch.eye(7).bool(), w, 0.0),
    "a product": lambda w: torch.ones(3, 7) @ w,
    "a vector": lambda w: w @ torch.ones(7),
    "rows": lambda w: w[ROWS],
    "an embedding": lambda w: F.embedding(ROWS, w),
    "a distance": lambda w: F.mse_loss(w, torch.zeros(7, 7)),
    "joined": lambda w: torch.cat([w, torch.ones(1, 7)]),
    "compared": lambda w: (torch.equal(w, torch.ones(7, 7)), torch.allclose(w, torch.ones(7, 7))),
    "several": lambda w: torch._foreach_add([w, w], [torch.ones(7, 7), torch.eye(7)]),
    "classes": lambda w: F.cross_entropy(w, torch.arange(7)),
    "convolved": lambda w: F.conv2d(torch.ones(1, 7, 3, 3), w[:, :, None, None]),
    "solved": lambda w: torch.linalg.solve(w @ w.t() + torch.eye(7), torch.ones(7, 1)),
    "into a plain one": lambda w: torch.ones(7, 7).add_(w),
}
LOSSES = (
    *(F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.l1_loss, F.soft_margin_loss),
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.kl_div),
)
GRADIENTS: dict[str, Use] = {
    **{loss.__name__: lambda w, loss=loss: loss(w.sigmoid(), torch.full_like(w, 0.2)) for loss in LOSSES},
    "rows": lambda w: sum(row.square().sum() * at for at, row in enumerate(w)),
    "flat": lambda w: (w.view(-1).square() * w.flatten()).mean(),
    "where true": lambda w: w[w > 0].square().sum(),
    "distances": lambda w: torch.cdist(w, w * 2).square().sum(),
    "renormed": lambda w: torch.renorm(w, 2, 0, 0.5).square().sum(),
}


class Using(torch.optim.Optimizer):
    """Uses a weight in its step."""

    def __init__(self, weight: Any, use: Use) -> None:
        super().__init__([weight], {})
        self.use = use

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return self.use(self.param_groups[0]["params"][0])


def compiled(zero: int | None) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Linear(7, 7)
    if zero is not None:
        zgraph.compile(made, zgraph.Plan(zero=zero, optimizer=zgraph.SGD(lr=0.1), backend="eager"))
        made(torch.ones(2, 7)).sum().backward()
    return made


def plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


def used(whole: Any, use: Use, *, in_step: bool) -> Any:
    """(what it gives, the weight after it)"""
    weight = whole.detach().clone()
    torch.manual_seed(3)
    with torch.no_grad():
        given = Using(weight, use).step() if in_step else use(weight)
        return plain(given), plain(weight).detach()


def differing(zero: int, uses: list[dict[str, Use]], in_step: bool) -> list[str]:
    found, both = [], (compiled(zero), compiled(None))
    for name, use in [(n, u) for table in uses for n, u in table.items()]:
        try:
            mine, theirs = (used(made.weight, use, in_step=in_step) for made in both)
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        except Exception as error:  # (all of them are told)
            found.append(f"{name}: {error!r}")
    return found


def all_differing(zero: int) -> list[str]:
    anywhere = differing(zero, [WRITES, READS, *([BESIDE_PLAIN] if zero == 0 else [])], False)
    return anywhere + differing(zero, [WRITES, READS, BESIDE_PLAIN], True)


@pytest.mark.gloo
@pytest.mark.parametrize("zero", [0, 3])
def test_operators_give_what_they_give_for_whole_tensors(two: Ranks, zero: int) -> None:
    assert two.run(all_differing, zero) == [[], []]


def gradients_differing() -> list[str]:
    found, both = [], (compiled(3), compiled(None))
    for name, use in GRADIENTS.items():
        gradients = []
        for made in both:
            weight = made.weight.detach().requires_grad_()
            use(weight).backward()
            gradients.append(plain(weight.grad))
        if not torch.allclose(*gradients, rtol=1e-5, atol=1e-6):
            found.append(name)
    return found


@pytest.mark.gloo
def test_so_do_their_gradients(two: Ranks) -> None:
    assert two.run(gradients_differing) == [[], []]


def refused() -> list[str]:
    made, found = compiled(3), []
    weight = made.weight
    for name, use in BESIDE_PLAIN.items():
        with torch.no_grad(), pytest.raises(ModelError, match="plain tensor beside one that is divided") as caught:
            use(weight)
        assert "test_operators_of_shards.py:" in str(caught.value.where) and "distribute_tensor" in str(caught.value)
        found.append(name)
    with pytest.raises(ModelError, match="takes a tensor that is divided over the ranks"):
        dist.all_reduce(weight.grad)
    with pytest.raises(ModelError, match="fill_diagonal_"), torch.no_grad():
        weight.fill_diagonal_(0.0)
    for other in (made, compiled(0)):
        with pytest.raises(ModelError, match="t_ gives a tensor of a compiled model another form"), torch.no_grad():
            other.weight.t_()
    with pytest.raises(ModelError, match="writes to a part of a tensor"), torch.no_grad():
        weight.view(-1).zero_()
    return found


@pytest.mark.gloo
def test_what_would_be_a_ranks_own_is_refused(two: Ranks) -> None:
    assert two.run(refused) == [list(BESIDE_PLAIN)] * 2


def reduced_again() -> torch.Tensor:
    made = compiled(0)
    dist.all_reduce(made.weight.grad)
    return made.weight.grad.full_tensor()


@pytest.mark.gloo
def test_whole_gradients_are_reduced_again_as_plain_ones(two: Ranks) -> None:
    for mine in two.run(reduced_again):
        torch.testing.assert_close(mine, torch.full((7, 7), 4.0))


def averaged() -> bool:
    """Whether an average that is a plain tensor stays one beside whole weights, and is plain PyTorch's."""
    made = compiled(0)
    average = nn.Parameter(torch.full((7, 7), 2.0))
    expected = average.data * 0.9 + made.weight.full_tensor().detach() * 0.1
    average.data = average.data * 0.9 + made.weight.data * 0.1
    return type(average.data) is torch.Tensor and torch.equal(average.data, expected)


@pytest.mark.gloo
def test_what_is_computed_of_whole_weights_beside_plain_tensors_is_plain(two: Ranks) -> None:
    assert two.run(averaged) == [True, True]

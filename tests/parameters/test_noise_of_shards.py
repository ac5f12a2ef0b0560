"""Random numbers for divided tensors are those of plain PyTorch, where ranks have one seed; torch draws for each rank's part alone."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zgraph
from zgraph.errors import ModelError
from zgraph.torch_compat import operators_of_shards
from zgraph.torch_compat.noise_of_shards import NOISE

X = torch.arange(24.0).reshape(4, 6) / 10


def weights_noised(params: list[Any]) -> None:
    for p in params:
        p.add_(torch.randn_like(p) * p.std(), alpha=0.1)
        p.mul_(torch.rand_like(p) + 0.5)


def gradients_noised(params: list[Any]) -> None:
    generator = torch.Generator().manual_seed(4)
    for p in params:
        p.grad.add_(torch.empty_like(p.grad).normal_(0.0, 0.1, generator=generator))
        p.sub_(p.grad, alpha=0.1)


def initialised_again(params: list[Any]) -> None:
    for p in params:
        nn.init.normal_(p, std=0.3)
        if p.ndim == 2:
            nn.init.kaiming_uniform_(p, a=2.0)


def dropped(params: list[Any]) -> None:
    for p in params:
        p.copy_(nn.functional.dropout(p, 0.4) + torch.native_dropout(p, 0.3, True)[0])
        p.mul_(torch.bernoulli(p.sigmoid())).add_(torch.empty_like(p).bernoulli_(0.3))


def of_other_kinds(params: list[Any]) -> None:
    for p in params:
        p.add_(torch.empty_like(p).exponential_(2.0)).add_(torch.randint_like(p, 3, 7))
        p.add_(torch.empty_like(p).log_normal_(0.0, 0.1)).add_(torch.empty_like(p).geometric_(0.5))
        p.add_(torch.empty_like(p).cauchy_().clamp_(-1, 1))


def of_views(params: list[Any]) -> None:
    for p in params:
        p.t().add_(torch.randn_like(p.t()))
        p.add_(torch.randn_like(p, dtype=torch.float64).float())


RULES = {
    f.__name__: f for f in (weights_noised, gradients_noised, initialised_again, dropped, of_other_kinds, of_views)
}


def all_noised(plan: dict[str, Any] | None) -> dict[str, tuple[list[torch.Tensor], torch.Tensor]]:
    """(whole weights, what is drawn next) of each rule, which all begin with the same weights and gradients of one model."""
    torch.manual_seed(0)
    made, x = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5)), X
    if plan is not None:
        zgraph.compile(made, zgraph.Plan(backend="eager", **plan))
        if "mesh" not in plan:
            x = X.chunk(dist.get_world_size())[dist.get_rank()]
    made(x).square().mean().backward()
    first = [p.detach().clone() for p in made.parameters()]
    found = {}
    for name, rule in RULES.items():
        with torch.no_grad():
            for p, value in zip(made.parameters(), first, strict=True):
                p.copy_(value)
            torch.manual_seed(3)
            for _ in range(2):
                rule(list(made.parameters()))
        weights = [p.detach() for p in made.parameters()]
        whole = [(w.full_tensor() if isinstance(w, DTensor) else w).clone() for w in weights]
        found[name] = whole, torch.rand(3)
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("zero", [0, 3])
def test_noise_is_that_of_plain_pytorch(two: Ranks, zero):
    plain = all_noised(None)
    for mine in two.run(all_noised, {"zero": zero}):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.gloo
def test_it_is_where_rows_and_columns_are_divided(four: Ranks):
    plain = all_noised(None)
    for mine in four.run(divided_twice):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)


def divided_twice() -> dict[str, Any]:
    return all_noised({"zero": 3, "mesh": {"dp": 2, "tp": 2}})


def undrawn(zero: int) -> list[str]:
    made = zgraph.compile(nn.Linear(6, 7), zgraph.Plan(backend="eager", zero=zero))
    made(X).sum().backward()
    found = []
    for draw in (lambda p: nn.functional.rrelu(p, training=True), lambda p: torch.multinomial(p.abs(), 2)):
        try:
            with torch.no_grad():
                draw(made.weight)
        except ModelError as error:
            found.append(str(error).partition(" ")[0])
    return found


@pytest.mark.gloo
def test_what_is_not_drawn_for_the_whole_is_refused(two: Ranks):
    assert two.run(undrawn, 3) == [["rrelu_with_noise", "multinomial"]] * 2
    assert two.run(undrawn, 0) == [[], []]


def on_other_meshes() -> list[torch.Tensor]:
    others = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    theirs = distribute_tensor(torch.ones(4, 3), others, [Shard(0), Shard(0)])
    torch.manual_seed(0)
    drawn = [torch.rand_like(theirs), theirs.clone().normal_(), *torch.native_dropout(theirs, 0.5, True)]
    assert drawn[1].placements == theirs.placements
    return [d.to_local() for d in drawn]


def beside_another_mesh() -> None:
    gc.collect()
    before = on_other_meshes()
    made = zgraph.compile(nn.Linear(6, 7), zgraph.Plan(backend="eager", zero=3))
    assert NOISE.keys() <= operators_of_shards.table().keys()
    torch.testing.assert_close(on_other_meshes(), before, rtol=0, atol=0)
    del made
    gc.collect()
    # (other files may have left models on these ranks)
    assert operators_of_shards._meshes or not NOISE.keys() & operators_of_shards.table().keys()


@pytest.mark.gloo
def test_tensors_on_other_meshes_are_drawn_as_before(two: Ranks):
    two.run(beside_another_mesh)

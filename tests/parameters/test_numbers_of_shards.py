"""Numbers that are read of divided tensors: those of whole tensors in an optimizer's step, and refused elsewhere; torch reads a rank's own part."""

from __future__ import annotations

import gc
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from sweeps import sweep
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zgraph
from zgraph.errors import ModelError
from zgraph.torch_compat import operators_of_shards
from zgraph.torch_compat.numbers_of_shards import NUMBERS

X = torch.arange(24.0).reshape(4, 6) / 10


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))


def loss_of(made: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (made(x) * torch.arange(5)).square().mean()


def trust_ratio(params: list[Any], state: dict[str, Any]) -> None:
    for p in params:
        p.sub_(p.grad, alpha=1e-2 * p.norm().item() / max(p.grad.norm().item(), 1e-6))


def norm_of_all(params: list[Any], state: dict[str, Any]) -> None:
    norm = math.sqrt(sum(float(p.grad.norm()) ** 2 for p in params))
    for p in params:
        p.sub_(p.grad, alpha=0.1 / norm)


def largest(params: list[Any], state: dict[str, Any]) -> None:
    most = max(p.grad.abs().max().item() for p in params)
    for p in params:
        p.sub_(p.grad, alpha=0.1 / most)


def branch(params: list[Any], state: dict[str, Any]) -> None:
    for p in params:
        p.sub_(p.grad, alpha=1e-2 if (p.grad.abs() > 2).any() else 1e-1)


def counted(params: list[Any], state: dict[str, Any]) -> None:
    for p in params:
        p.sub_(p.grad, alpha=1e-2 * int((p.grad > 0).sum()))


def estimated(params: list[Any], state: dict[str, Any]) -> None:
    d, over, under = state.get("d", 1e-2), 0.0, 0.0
    for at, p in enumerate(params):
        total = state.setdefault(at, torch.zeros_like(p))
        over += (p.grad * total).sum().item() * d
        total.add_(p.grad, alpha=d)
        under += total.abs().sum().item()
    state["d"] = max(d, over / under)
    for p in params:
        p.sub_(p.grad, alpha=state["d"])


RULES = {f.__name__: f for f in (trust_ratio, norm_of_all, largest, branch, counted, estimated)}


class OfARule(torch.optim.Optimizer):
    """Updates by one of the rules."""

    def __init__(self, params: Any, rule: str) -> None:
        super().__init__(params, {})
        self.rule, self.kept = rule, {}

    @torch.no_grad()
    def step(own, closure: Any = None) -> None:  # (no language rule says that it is called self)
        RULES[own.rule](own.param_groups[0]["params"], own.kept)


def updated(zero: int | None, rule: str) -> list[torch.Tensor]:
    made, x = model(), X
    if zero is not None:
        zgraph.compile(made, zgraph.Plan(backend="eager", zero=zero))
        x = X.chunk(dist.get_world_size())[dist.get_rank()]
    optimizer = OfARule(made.parameters(), rule)
    for _ in range(3):
        loss_of(made, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in made.parameters()]


@pytest.mark.gloo
@sweep("zero,rule", [(zero, rule) for zero in (3, 1) for rule in RULES], quick=[0, 1, 3, 5])
def test_an_optimizer_reads_numbers_of_whole_tensors(two: Ranks, zero, rule):
    plain = updated(None, rule)
    for mine in two.run(updated, zero, rule):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)


READ = {
    "item": lambda g: g.norm().item(),
    "float": lambda g: float(g.abs().max()),
    "int": lambda g: int((g > 0).sum()),
    "if": lambda g: bool((g > 1e3).any()),
    "index": lambda g: list(range((g > 0).sum())),
}


def refusals() -> list[str]:
    made = zgraph.compile(model(), zgraph.Plan(backend="eager", zero=3))
    loss_of(made, X).backward()
    found = []
    for read in READ.values():
        for p in made.parameters():
            with pytest.raises(ModelError, match="a number is read of a tensor that is divided") as caught:
                read(p.grad)
            found.append(str(caught.value.where))
    with pytest.raises(ModelError, match="a number is read of a tensor that is divided"):
        torch.optim.SGD(made.parameters(), 0.1).step(lambda: made[0].weight.norm().item())
    # What says the same on all ranks is read as before, and what the hints name is right.
    assert (made[0].weight.grad.norm() > 0) and torch.equal(made[0].weight, made[0].weight)
    whole = {name: float(p.grad.full_tensor().norm()) for name, p in made.named_parameters()}
    assert {name: float(norm) for name, norm in made.zgraph.grad_norms().items()} == pytest.approx(whole)
    norm = torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0, error_if_nonfinite=True)
    assert norm.item() == pytest.approx(math.sqrt(sum(n**2 for n in whole.values())))
    return found


@pytest.mark.gloo
def test_a_number_that_would_be_a_ranks_own_is_refused(two: Ranks):
    for places in two.run(refusals):
        assert len(places) == 4 * len(READ) and all("test_numbers_of_shards.py:" in place for place in places)


def beside_another_mesh() -> None:
    others = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    theirs = distribute_tensor(torch.arange(6.0).reshape(2, 3), others, [Shard(0), Shard(0)])
    own = [3.0, 12.0][dist.get_rank()]
    gc.collect()
    before = list(operators_of_shards._meshes)  # (of models that other files have left on these ranks)
    assert theirs.sum().item() == own
    made = zgraph.compile(model(), zgraph.Plan(backend="eager", zero=3))
    assert len(operators_of_shards._meshes) == len(before) + 1 and theirs.sum().item() == own
    del made
    gc.collect()
    assert operators_of_shards._meshes == before
    assert before or not NUMBERS.keys() & operators_of_shards.table().keys()
    assert theirs.sum().item() == own


@pytest.mark.gloo
def test_tensors_on_other_meshes_are_left_alone(two: Ranks):
    two.run(beside_another_mesh)


def all_numbers() -> None:
    plain, read = model(), zgraph.compile(model(), zgraph.Plan(backend="eager", zero=0))
    weight, theirs = read[0].weight, plain[0].weight
    assert weight.tolist() == theirs.tolist() and (np.asarray(weight.detach()) == theirs.detach().numpy()).all()
    with pytest.raises(RuntimeError, match="requires grad"):
        weight.numpy()
    with torch.no_grad():
        weight.detach().numpy()[0] = 2.0  # (the memory is the weight's)
        assert torch.equal(weight.full_tensor()[0], torch.full((6,), 2.0))
    divided = zgraph.compile(model(), zgraph.Plan(backend="eager", zero=3))[0].weight
    for use in (lambda w: w.detach().numpy(), lambda w: np.asarray(w.detach()), lambda w: w.tolist()):
        with pytest.raises(ModelError, match="a number is read of a tensor that is divided") as caught:
            use(divided)
        assert "test_numbers_of_shards.py:" in str(caught.value.where)


@pytest.mark.gloo
def test_all_numbers_of_a_whole_tensor_are_read_as_of_a_plain_one(two: Ranks):
    two.run(all_numbers)

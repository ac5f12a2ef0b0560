"""What was made of a model's parameters before it was compiled acts as it does in plain PyTorch, or is refused.

Optimizers and lists hold parameter objects; hooks hang on them. Where a parameter becomes a shard it is another object.
"""

from __future__ import annotations

import pytest
import torch
from sweeps import sweep
from torch import nn
from torch.distributed.tensor import DTensor

import zgraph
from zgraph.errors import ModelError, StepError


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(4, 3).t())

    def forward(self, x):
        return (x @ self.w).pow(2).mean()


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def batch(rank, number=0):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(100 + 10 * number + rank))


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# -- in one process without a group the objects stay ----------------------------------------------------------------------
def test_an_optimizer_made_before_trains_a_parameter_that_is_stored_anew():
    trained = []
    for compiled in (False, True):
        model = Transposed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if compiled:
            zgraph.compile(model, zgraph.Plan(backend="eager"))
        for seed in range(3):
            optimizer.zero_grad()
            model(batch(seed)[:, :3]).backward()
            optimizer.step()
        trained.append(model.w.detach())
    torch.testing.assert_close(trained[1], trained[0], rtol=0, atol=0)


def test_hooks_and_gradients_stay_with_a_parameter_that_is_stored_anew():
    found = []
    for compiled in (False, True):
        model, calls = Transposed(), []
        model.w.register_hook(lambda g: g * 3)
        model.w.register_post_accumulate_grad_hook(lambda p, calls=calls: calls.append(p.grad.clone()))
        model(batch(0)[:, :3]).backward()
        if compiled:
            zgraph.compile(model, zgraph.Plan(backend="eager"))
        model(batch(1)[:, :3]).backward()
        found.append(calls)
    assert len(found[1]) == 2 and torch.equal(found[0][1], found[1][1])


def test_an_optimizer_made_before_on_the_meta_device_is_refused():
    with torch.device("meta"):
        model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zgraph.compile(model, zgraph.Plan(backend="eager"))
    model(batch(0)).sum().backward()
    with pytest.raises(StepError, match="made before the model got its weights"):
        optimizer.step()


# -- on ranks -------------------------------------------------------------------------------------------------------------
def refusals(zero):
    """What each thing that holds the old parameters says, by its name."""
    model = net()
    held = list(model.parameters())
    made = torch.optim.AdamW(model.parameters(), lr=0.1)
    zgraph.compile(model, zgraph.Plan(backend="eager", zero=zero))
    model(batch(0)).sum().backward()
    said = {}
    for name, use in {
        "step": made.step,
        "zero_grad": made.zero_grad,
        "clip": lambda: torch.nn.utils.clip_grad_norm_(held, 1.0),
        "grad": lambda: held[0].grad,
        "hook": lambda: held[0].register_hook(print),
        "freeze": lambda: held[0].requires_grad_(False),
        "init": lambda: nn.init.zeros_(held[0]),
    }.items():
        try:
            use()
            said[name] = "nothing"
        except StepError as error:
            said[name] = str(error)
    # Another's optimizer, and one made after, are left alone.
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    before = full(model[0].weight).clone()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    said["after"] = "trained" if not torch.equal(before, full(model[0].weight)) else "not trained"
    said["values"] = str(torch.equal(held[0].detach(), net()[0].weight))
    return said


@pytest.mark.gloo
@pytest.mark.parametrize("zero", [0, 3])
def test_what_holds_parameters_that_were_replaced_is_refused_at_first_use(two, zero):
    for said in two.run(refusals, zero):
        assert said.pop("after") == "trained" and said.pop("values") == "True"
        assert all("made before" in x and "0.weight" in x for x in said.values()), said


def hooked(zero, accumulate):
    """The gradients of two backwards of a model whose first weight has hooks from before, and how often they were called."""
    model, calls = net(), []
    handle = model[0].weight.register_hook(lambda g: g * 3)
    gone = model[0].bias.register_hook(lambda g: g * 0)
    model[2].weight.requires_grad_(True).register_hook(lambda g: g * 2)
    model[2].weight.requires_grad_(False)
    model[0].weight.register_post_accumulate_grad_hook(lambda p: calls.append(1))
    zgraph.compile(model, zgraph.Plan(backend="eager", zero=zero))
    gone.remove()
    rank = torch.distributed.get_rank()
    with model.no_sync() if accumulate else torch.enable_grad():
        model(batch(rank)).pow(2).mean().backward()
    model(batch(rank, 1)).pow(2).mean().backward()
    found = {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    handle.remove()
    model.zero_grad()
    model[2].weight.requires_grad_(True)
    model(batch(rank)).pow(2).mean().backward()
    return found, len(calls), full(model[0].weight.grad), full(model[2].weight.grad)


@pytest.mark.gloo
@sweep("zero, accumulate", [(0, True), (0, False), (3, False)], quick=(0, 2))
def test_hooks_registered_before_act_on_the_reduced_gradient_of_each_backward(two, zero, accumulate):
    plain = net()
    for number in (0, 1):
        for rank in (0, 1):
            (plain(batch(rank, number)).pow(2).mean() / 2).backward()
    once = net()
    for rank in (0, 1):
        (once(batch(rank)).pow(2).mean() / 2).backward()
    factors = {"0.weight": 3, "0.bias": 1, "2.bias": 1}
    for found, calls, without, unfrozen in two.run(hooked, zero, accumulate):
        assert found.keys() == factors.keys() and calls == 3
        for name, factor in factors.items():
            torch.testing.assert_close(found[name], factor * plain.get_parameter(name).grad)
        torch.testing.assert_close(without, once[0].weight.grad)
        torch.testing.assert_close(unfrozen, 2 * once[2].weight.grad)


def unmovable():
    """What compile says of a gradient, and of a hook over several parameters, that were there before."""
    said = []
    for prepare in (
        lambda m: m(batch(0)).sum().backward(),
        lambda m: torch.autograd.graph.register_multi_grad_hook(list(m.parameters()), lambda grads: None),
    ):
        model = net()
        prepare(model)
        try:
            zgraph.compile(model, zgraph.Plan(backend="eager"))
        except ModelError as error:
            said.append(str(error))
    return said


@pytest.mark.gloo
def test_what_can_not_go_over_to_shards_is_refused_at_compile(two):
    for gradient, hook in two.run(unmovable):
        assert "'0.weight' has a gradient already" in gradient
        assert "'0.weight' has a hook over several parameters" in hook


def hook_in_stages():
    """What a model in stages says of a hook, registered before compile and after."""
    said = []
    for late in (False, True):
        model = net()
        if not late:
            model[0].weight.register_hook(print)
        try:
            zgraph.compile(
                model,
                zgraph.Plan(backend="eager", mesh={"pp": 2}, micro_batches=2, partition=["2"]),
                inputs=(batch(0),),
                loss_fn=lambda out: out.pow(2).mean(),
            )
            for param in model.parameters():
                param.register_hook(print)
            model.train_step(batch(0))
        except ModelError as error:
            said.append(str(error))
    return said


@pytest.mark.gloo
def test_hooks_of_parameters_in_stages_are_refused(two):
    for said in two.run(hook_in_stages):
        assert len(said) == 2 and all("'0.weight' of a model in stages has a hook" in x for x in said)

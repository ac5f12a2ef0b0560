"""The plan's optimizer is one of torch's: states from torch go on where they were, what is put into it acts, or is refused.

Everything is compared with torch.optim on the plain model. `eager` rounds as torch does, so numbers are equal bit for bit.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from sweeps import product, sweep
from torch import nn

import zgraph
from zgraph.errors import ModelError, PlanError, RankMismatchError, StepError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))).pow(2).mean()


def batch(seed):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


PAIRS = {
    "SGD": (torch.optim.SGD, zgraph.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "nesterov": (torch.optim.SGD, zgraph.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "AdamW": (torch.optim.AdamW, zgraph.AdamW, {"lr": 0.1}),
    "Adam": (torch.optim.Adam, zgraph.Adam, {"lr": 0.1, "amsgrad": True}),
    "Adagrad": (torch.optim.Adagrad, zgraph.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
}


class Both:
    """A plain model with torch's optimizer, and a compiled one with the plan's, which go on alike."""

    def __init__(self, kind="SGD", steps=0, backend="eager"):
        theirs, mine, numbers = PAIRS[kind]
        self.plain, self.model = Net(), Net()
        self.torchs = theirs(self.plain.parameters(), foreach=False, **numbers)
        zgraph.compile(self.model, zgraph.Plan(backend=backend, optimizer=mine(**numbers)))
        self.ours = self.model.zgraph.optimizer
        self.at = 0
        self.step(steps)

    def plain_step(self, steps=1, first=0):
        for seed in range(first, first + steps):
            self.torchs.zero_grad()
            self.plain(batch(seed)).backward()
            self.torchs.step()

    def step(self, steps=1):
        self.plain_step(steps, self.at)
        for seed in range(self.at, self.at + steps):
            self.model.train_step(batch(seed))
        self.at += steps

    def change(self, change):
        """The same to both: `change(optimizer, model)`."""
        change(self.torchs, self.plain)
        change(self.ours, self.model)

    def assert_equal(self, **tolerance):
        for mine, theirs in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, **(tolerance or {"rtol": 0, "atol": 0}))


# -- states from torch, and to it -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", PAIRS)
def test_a_state_dict_of_torch_goes_on_as_torch_does_and_back(kind):
    both = Both(kind)
    both.plain_step(4)
    both.model.load_state_dict(both.plain.state_dict())
    saved = io.BytesIO()
    torch.save(both.torchs.state_dict(), saved)
    saved.seek(0)
    both.ours.load_state_dict(torch.load(saved))
    both.at = 4
    both.step(2)
    both.assert_equal()
    both.torchs.load_state_dict(copy.deepcopy(both.ours.state_dict()))  # (torch takes tensors as they are)
    both.step(2)
    both.assert_equal()


def test_a_parameter_of_which_nothing_was_saved_begins_anew():
    both = Both("AdamW", 2)
    both.torchs.state.pop(both.plain.b.bias)
    both.ours.load_state_dict(both.torchs.state_dict())
    both.step(2)
    both.assert_equal()
    both = Both("SGD", 2)
    both.torchs.state[both.plain.b.bias]["momentum_buffer"] = None
    both.ours.load_state_dict(both.torchs.state_dict())
    both.step(2)
    both.assert_equal()


def test_a_state_without_a_count_is_refused_where_the_rule_counts():
    both = Both("AdamW", 1)
    state = copy.deepcopy(both.torchs.state_dict())
    for kept in state["state"].values():
        del kept["step"]
    with pytest.raises(ModelError, match="no count of updates"):
        both.ours.load_state_dict(state)


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_a_plain_distributed_checkpoint_goes_on_with_its_momentum(tmp_path, kind):
    both = Both(kind)
    both.plain_step(4)
    names = [n for n, _ in both.plain.named_parameters()]
    states = {names[i]: dict(kept) for i, kept in both.torchs.state_dict()["state"].items()}
    dcp.save({"model": both.plain.state_dict(), "optimizer": {"state": states}}, checkpoint_id=tmp_path)
    both.model.load_checkpoint(tmp_path)
    both.at = 4
    both.step(2)
    both.assert_equal()


def test_each_parameters_count_is_its_own_in_a_state_dict():
    both = Both("AdamW", 1)
    state = both.ours.state_dict()["state"]
    assert len({kept["step"].data_ptr() for kept in state.values()}) == 4
    state[0]["step"].fill_(7.0)  # (as torch.distributed.checkpoint fills it in place)
    both.step()
    both.assert_equal()


# -- what is changed by hand ----------------------------------------------------------------------------------------------
def cleared(optimizer, model):
    optimizer.state.clear()


def deleted(optimizer, model):
    del optimizer.state[model.a.weight]


def popped(optimizer, model):
    optimizer.state.pop(model.b.bias)


def assigned(optimizer, model):
    for param in model.parameters():
        for key in optimizer.state[param]:
            if key != "step":
                optimizer.state[param][key] = torch.full_like(param, 0.25)


def updated(optimizer, model):
    for param in model.parameters():
        optimizer.state[param].update({k: torch.zeros_like(param) for k in optimizer.state[param] if k != "step"})


def in_place(optimizer, model):
    for param in model.parameters():
        for key, value in optimizer.state[param].items():
            if key != "step":
                value.mul_(0.5)


def replaced(optimizer, model):
    kept = {p: {k: v * 2 for k, v in s.items()} for p, s in optimizer.state.items()}
    optimizer.state = torch.optim.SGD([torch.ones(1)]).state
    for param, values in kept.items():
        optimizer.state[param] = values


def counted(optimizer, model):
    for kept in optimizer.state.values():
        if "step" in kept:
            kept["step"] = torch.tensor(1.0)


def rate_as_tensor(optimizer, model):
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.03)


CHANGES = [cleared, deleted, popped, assigned, updated, in_place, replaced, counted, rate_as_tensor]


@product("change, kind", CHANGES, ["SGD", "AdamW"], together=1)
def test_what_is_changed_in_the_state_acts_as_in_torch(kind, change):
    both = Both(kind, 3)
    both.change(change)
    both.step(2)
    both.assert_equal(**({"rtol": 1e-6, "atol": 1e-7} if change is rate_as_tensor else {}))


def test_a_changed_state_is_what_is_saved(tmp_path):
    both = Both("AdamW", 2)
    both.change(cleared)
    assert all(not float(kept["step"]) for kept in both.ours.state_dict()["state"].values())
    both.model.save_checkpoint(tmp_path)
    both.change(cleared)
    both.step()
    both.assert_equal()


@pytest.mark.slow
def test_inductor_takes_changed_states_too():
    both = Both("SGD", 2, "inductor")
    both.change(cleared)
    both.step()
    both.change(assigned)
    both.step()
    both.assert_equal(rtol=1e-5, atol=1e-6)


@sweep(
    "change, said",
    [
        (lambda o, m: o.state[m.a.weight].pop("exp_avg"), "'exp_avg' of 'a.weight' is gone"),
        (lambda o, m: o.state[m.a.weight].update(exp_avg=torch.ones(3)), r"is \[3\] now, and was \[4, 4\]"),
        (lambda o, m: o.state[m.a.weight]["step"].fill_(9), "written to in place"),
        (lambda o, m: o.param_groups[0]["params"].pop(), "group 0 has 3 parameters now"),
        (lambda o, m: o.param_groups[0]["params"].reverse(), "not the 4 of the plan"),
        (lambda o, m: o.param_groups.append(dict(o.param_groups[0])), "there are 2 groups"),
        (lambda o, m: o.param_groups[0].pop("lr"), "no lr any more"),
    ],
    quick=4,
)
def test_what_no_update_can_go_on_from_is_refused_and_changes_nothing(change, said):
    both = Both("AdamW", 2)
    before = copy.deepcopy(both.model.state_dict())
    change(both.ours, both.model)
    for _ in range(2):  # (and again)
        with pytest.raises((StepError, PlanError), match=said):
            both.model.train_step(batch(2))
    assert all(torch.equal(before[n], v) for n, v in both.model.state_dict().items())


def test_a_parameter_group_that_is_added_is_refused():
    both = Both()
    with pytest.raises(PlanError, match="takes no further groups"):
        both.ours.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


# -- hooks ----------------------------------------------------------------------------------------------------------------
def test_hooks_of_step_run_with_every_step():
    both, calls = Both(), []

    def halve(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad.mul_(0.5)

    both.change(lambda o, m: o.register_step_pre_hook(halve))
    both.ours.register_step_post_hook(lambda *_: calls.append(1))
    both.step(2)
    both.assert_equal()
    both.model(batch(0)).backward()
    both.model.step()
    assert len(calls) == 3


def test_hooks_of_state_dicts_run():
    both, calls = Both("SGD", 1), []
    both.ours.register_load_state_dict_pre_hook(lambda o, state: calls.append("before"))
    both.ours.register_load_state_dict_post_hook(lambda o: calls.append("after"))
    both.ours.load_state_dict(both.torchs.state_dict())
    assert calls == ["before", "after"]


def test_who_holds_the_optimizer_holds_it_after_recompile():
    both, calls = Both("SGD", 1), []
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (both.torchs, both.ours)]
    both.ours.register_step_pre_hook(lambda *_: calls.append(1))
    both.model.zgraph.recompile(
        zgraph.Plan(backend="eager", micro_batches=2, optimizer=both.model.zgraph.plan.optimizer)
    )
    for scheduler in schedulers:
        scheduler.step()
    both.step()
    both.assert_equal(rtol=1e-6, atol=1e-7)
    assert len(calls) == 1
    both.model.zgraph.recompile(zgraph.Plan(backend="eager", optimizer=zgraph.AdamW()))
    with pytest.raises(StepError, match="no longer the model's"):
        both.ours.step()


# -- ranks ----------------------------------------------------------------------------------------------------------------
def differing(what):
    model = zgraph.compile(Net(), zgraph.Plan(backend="eager", zero=2, optimizer=zgraph.AdamW(lr=0.1)))
    model.train_step(batch(0))
    optimizer, rank = model.zgraph.optimizer, torch.distributed.get_rank()
    before = model.a.weight.full_tensor().clone()
    if rank == 1:
        if what == "lr":
            optimizer.param_groups[0]["lr"] = 0.2
        elif what == "betas":
            optimizer.param_groups[0]["betas"] = (0.8, 0.999)
        elif what == "state":
            optimizer.state.clear()
        elif what == "refused":
            optimizer.param_groups[0]["params"].pop()
    try:
        model.train_step(batch(1))
    except (RankMismatchError, StepError) as error:
        return type(error).__name__, str(error), torch.equal(before, model.a.weight.full_tensor())
    return "nothing", "", False


@pytest.mark.gloo
@pytest.mark.parametrize(
    "what, said",
    [
        ("lr", "lr of group 0 is 0.1 on rank 0 and 0.2 on rank 1"),
        ("betas", "betas.0 of group 0"),
        ("state", "a.weight: [] 0.0"),
    ],
)
def test_numbers_and_states_that_differ_between_ranks_are_refused_on_all(two, what, said):
    for kind, text, unchanged in two.run(differing, what):
        assert kind == "RankMismatchError" and said in text and unchanged


@pytest.mark.gloo
def test_what_one_rank_refuses_none_does(two):
    kinds = [kind for kind, _, unchanged in two.run(differing, "refused") if unchanged]
    assert kinds == ["RankMismatchError", "RankMismatchError"]


def changed_on_ranks(zero):
    """States of shards, put there whole and as shards, beside torch's on the plain model."""
    both = []
    for compiled in (False, True):
        model = Net()
        if compiled:
            zgraph.compile(model, zgraph.Plan(backend="eager", zero=zero, optimizer=zgraph.AdamW(lr=0.1)))
            optimizer = model.zgraph.optimizer
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        for seed in range(4):
            optimizer.zero_grad()
            model(batch(seed)).backward()
            optimizer.step()
            if seed == 1:
                for n, param in model.named_parameters():
                    whole = torch.full(param.shape, 0.25)
                    optimizer.state[param]["exp_avg"] = whole if n[0] == "a" else torch.full_like(param, 0.25)
            if seed == 2:
                del optimizer.state[model.a.weight]
        both.append([p.full_tensor() if compiled else p.detach() for p in model.parameters()])
    return both


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.c.weight = self.a.weight

    def forward(self, x):
        return self.c(self.b(self.a(x).relu()).relu()).square().mean()


def changed_in_stages(where):
    """States that each stage clears of its own parameters, beside torch's on the plain model; or that one alone clears of what both have."""
    both = []
    for compiled in (False, True):
        model = Tied()
        if compiled:
            plan = zgraph.Plan(
                backend="eager", mesh={"pp": 2}, micro_batches=2, partition=["b"], optimizer=zgraph.AdamW(lr=0.1)
            )
            zgraph.compile(model, plan, inputs=(torch.ones(4, 4),))
        optimizer = model.zgraph.optimizer if compiled else torch.optim.AdamW(model.parameters(), lr=0.1)
        for seed in range(3):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
            try:
                model.train_step(x) if compiled else (model(x).backward(), optimizer.step(), optimizer.zero_grad())
            except RankMismatchError as error:
                return str(error)
            if seed == 1 and where == "everywhere":
                optimizer.state.clear()
            elif seed == 1 and compiled and torch.distributed.get_rank() == 1:
                del optimizer.state[dict(model.named_parameters())["a.weight"]]
        both.append({n: p.detach().clone() for n, p in model.named_parameters() if not p.is_meta})
    return both


@pytest.mark.gloo
def test_states_of_stages_can_be_changed(two):
    found = two.run(changed_in_stages, "everywhere")
    for plain, mine in found:
        for name, value in mine.items():
            torch.testing.assert_close(value, plain[name], rtol=1e-5, atol=1e-6)
    assert {n for _, mine in found for n in mine} == {"a.weight", "a.bias", "b.weight", "b.bias"}


@pytest.mark.gloo
def test_a_state_that_stages_share_is_changed_on_all_or_refused(two):
    for said in two.run(changed_in_stages, "on one rank"):
        assert "ranks disagree" in said and "a.weight: nothing changed on rank 0, [] 0.0 on rank 1" in said


@pytest.mark.gloo
@pytest.mark.parametrize("zero", [0, 3])
def test_states_of_shards_can_be_changed(two, zero):
    for plain, mine in two.run(changed_on_ranks, zero):
        for a, b in zip(mine, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# -- groups -------------------------------------------------------------------------------------------------------------
def test_groups_are_in_the_plans_order_behind_all_other_parameters():
    """As in torch's optimizers, so that a scheduler's numbers for each group are those of the same parameters."""
    plain, model = Net(), Net()
    names = [["b.weight"], ["b.bias", "a.weight"], ["a.bias"]]  # (the module's order is another)
    params = dict(plain.named_parameters())
    numbers = [{"lr": 0.3}, {"lr": 0.1}, {"lr": 0.3}]
    theirs = torch.optim.SGD(
        [{"params": [params[n] for n in group], **given} for group, given in zip(names, numbers, strict=True)],
        foreach=False,
    )
    groups = tuple(zgraph.ParamGroup(match=tuple(n), **given) for n, given in zip(names[1:], numbers[1:], strict=True))
    zgraph.compile(model, zgraph.Plan(backend="eager", optimizer=zgraph.SGD(lr=0.3, groups=groups)))
    ours = model.zgraph.optimizer
    assert [sorted(group["names"]) for group in ours.param_groups] == [sorted(group) for group in names]
    each = [lambda n: 0.5**n, lambda n: 1.0, lambda n: 0.1**n]
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, each) for optimizer in (theirs, ours)]
    for seed in range(3):
        for one, optimizer, schedule in zip((plain, model), (theirs, ours), schedules, strict=True):
            optimizer.zero_grad()
            one(batch(seed)).backward()
            optimizer.step()
            schedule.step()
        assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), model.parameters(), strict=True))

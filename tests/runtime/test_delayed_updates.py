"""Updates one step late: what they are by definition, written out with torch's own optimizer; and what stops and starts them."""

from __future__ import annotations

import copy

import pytest
import refusals
import torch
from sweeps import sweep
from torch import nn

import zgraph
from zgraph.build.planned_step import programs, update_program
from zgraph.codegen.eager import compile_eager
from zgraph.codegen.update_chunks import compile_chunks
from zgraph.errors import OffloadError, PlanError, StepError
from zgraph.runtime.delayed_updates import refuse_late_collectives

AWAY = {"optimizer": "cpu", "least_bytes": 1, "sub_group_bytes": 1}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 8, generator=generator) for _ in range(count)]


def plan_of(after: int | None = 0, backend: str = "eager", away=AWAY, **more) -> zgraph.Plan:
    more = {"optimizer": zgraph.AdamW(lr=0.05), "mesh": {"dp": 1}, "backend": backend, **more}
    return zgraph.Plan(**more, offload={**away, "delayed_after": after})


def by_definition(steps: int, after: int, clip: float | None = None) -> tuple[list[float], list[torch.Tensor]]:
    """Losses, and the weights at the end: the gradients of weights w update their copies, which become w one step later."""
    model, ahead = net(), net()
    optimizer = torch.optim.AdamW(ahead.parameters(), lr=0.05)
    losses = []
    for number, x in enumerate(batches(steps)):
        model.zero_grad()
        loss = model(x)
        loss.backward()
        losses.append(float(loss.detach()))
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        publish(ahead, model)
        for mine, param in zip(ahead.parameters(), model.parameters(), strict=True):
            mine.grad = param.grad.clone()
        optimizer.step()
        if number < after:
            publish(ahead, model)
    publish(ahead, model)
    return losses, [p.detach() for p in model.parameters()]


def publish(ahead: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for mine, param in zip(ahead.parameters(), model.parameters(), strict=True):
            param.copy_(mine)


def trained(plan: zgraph.Plan, steps: int = 6) -> tuple[nn.Module, list[float]]:
    model = zgraph.compile(net(), plan)
    losses = [float(model.train_step(x)) for x in batches(steps)]
    model.zgraph.finish()
    return model, losses


def same(model: nn.Module, weights: list[torch.Tensor]) -> bool:
    return all(torch.equal(p.detach(), w) for p, w in zip(model.parameters(), weights, strict=True))


@sweep("after", [0, 1, 3, 10], quick=2)
def test_steps_are_those_of_the_definition_bit_for_bit(after):
    model, losses = trained(plan_of(after))
    expected, weights = by_definition(6, after)
    assert losses == expected and same(model, weights)


@pytest.mark.slow
def test_late_is_not_in_time():
    assert trained(plan_of(0))[1] != trained(plan_of(None))[1]
    assert trained(plan_of(10))[1] == trained(plan_of(None))[1]


@sweep("parameters", ["none", "cpu", "disk"], quick=1)
@sweep("states", ["cpu", "disk"], quick=1)
def test_wherever_states_and_parameters_lie(states, parameters, tmp_path):
    away = {**AWAY, "optimizer": states, "parameters": parameters}
    away = {k: f"nvme:{tmp_path}" if v == "disk" else v for k, v in away.items()}
    expected, weights = by_definition(30, 0, 0.1)
    model, losses = trained(plan_of(0, away=away, grad_clip=0.1), 30)
    assert losses == expected and same(model, weights)


@pytest.mark.slow  # (a step that Inductor compiles: test_a_hundred_steps_compiled_by_inductor_are_torchs)
@pytest.mark.inductor
def test_compiled():
    model, losses = trained(plan_of(0, "inductor"))
    expected, weights = by_definition(6, 0)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert all(torch.allclose(p, w, rtol=1e-5, atol=1e-6) for p, w in zip(model.parameters(), weights, strict=True))


def test_what_stays_on_the_device_is_updated_in_time():
    """Half of the states stay: their parameters' updates are seen by the next forward."""
    model = zgraph.compile(net(), plan_of(0, away={**AWAY, "ratio": 0.5}))
    late = model.zgraph.runtime.updater.options.late()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.train_step(batches(1)[0])
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert late and changed == before.keys() - late
    model.zgraph.finish()
    assert not any(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_a_checkpoint_of_weights_and_states_goes_on_bit_for_bit():
    model = zgraph.compile(net(), plan_of())
    losses = [float(model.train_step(x)) for x in batches(4)]
    weights, states = copy.deepcopy(model.state_dict()), copy.deepcopy(model.zgraph.optimizer.state_dict())
    losses += [float(model.train_step(x)) for x in batches(8)[4:]]
    again = zgraph.compile(net(), plan_of())
    again.load_state_dict(weights)
    again.zgraph.optimizer.load_state_dict(states)
    assert [float(again.train_step(x)) for x in batches(8)[4:]] == losses[4:]
    assert losses == by_definition(8, 0)[0]


def test_states_of_updates_in_time_can_be_loaded():
    """The copies begin as the weights."""
    model, _ = trained(plan_of(None), 3)
    late = zgraph.compile(net(), plan_of())
    late.load_state_dict(model.state_dict())
    late.zgraph.optimizer.load_state_dict(model.zgraph.optimizer.state_dict())
    x = batches(1)[0]
    assert float(late.train_step(x)) == float(model.train_step(x))
    late.zgraph.finish()
    assert all(torch.equal(a, b) for a, b in zip(late.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.8])
def test_parameters_of_one_shape_of_which_some_are_late(ratio):
    """Of a group that is updated together all are, or none."""
    away = {"optimizer": "cpu", "least_bytes": 1, "ratio": ratio}
    model = zgraph.compile(net(), plan_of(0, away=away))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.train_step(batches(1)[0])
    late = model.zgraph.runtime.updater.options.late()
    assert late and {n for n, p in model.named_parameters() if torch.equal(p, before[n])} == late
    model.zgraph.finish()
    assert not any(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_states_in_time_loaded_into_a_model_that_was_late_already():
    model, _ = trained(plan_of(None), 3)
    late, _ = trained(plan_of(), 5)
    late.train_step(batches(1)[0])
    late.load_state_dict(model.state_dict())
    late.zgraph.optimizer.load_state_dict(model.zgraph.optimizer.state_dict())
    late.zgraph.finish()
    assert all(torch.equal(a, b) for a, b in zip(late.parameters(), model.parameters(), strict=True))


def test_states_of_late_updates_loaded_into_a_plan_in_time():
    """The weights are then those after all updates."""
    late = zgraph.compile(net(), plan_of())
    for x in batches(4):
        late.train_step(x)
    plain = zgraph.compile(net(), plan_of(None))
    plain.load_state_dict(late.state_dict())
    plain.zgraph.optimizer.load_state_dict(late.zgraph.optimizer.state_dict())
    late.zgraph.finish()
    assert all(torch.equal(a, b) for a, b in zip(late.parameters(), plain.parameters(), strict=True))
    x = batches(5)[4]
    assert float(late.train_step(x)) == float(plain.train_step(x))


def test_a_load_stays_whatever_comes_then():
    model = zgraph.compile(net(), plan_of())
    for x in batches(3):
        model.train_step(x)
    fresh = net().state_dict()
    model.load_state_dict(fresh)
    twin = copy.deepcopy(model)
    model.zgraph.recompile(plan_of())
    for one in (model, twin):
        one.zgraph.finish()
        assert all(torch.equal(p, fresh[n]) for n, p in one.named_parameters())


def test_recompiled_for_an_optimizer_without_states():
    model = zgraph.compile(net(), plan_of())
    other = zgraph.compile(net(), plan_of())
    for one in (model, other):
        one.train_step(batches(1)[0])
    other.zgraph.finish()
    model.zgraph.recompile(plan_of(optimizer=zgraph.SGD(lr=0.1)))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_nothing_is_copied_twice(monkeypatch):
    model = zgraph.compile(net(), plan_of(100))
    model.train_step(batches(1)[0])
    delayed = model.zgraph.runtime.updater._delayed
    versions = {n: p._version for n, p in model.named_parameters()}
    copies = {n: t._version for n, t in model.zgraph.runtime.updater.states.own().items()}
    model.zgraph.finish()
    assert {n: p._version for n, p in model.named_parameters()} == versions and not delayed.publish()
    assert {n: t._version for n, t in model.zgraph.runtime.updater.states.own().items()} == copies


def test_a_budget_has_room_for_what_an_update_brings_beside_a_step():
    def least(after: int | None) -> int:
        away = {"optimizer": "nvme:/tmp", "least_bytes": 1, "sub_group_bytes": 2**20}
        plan = plan_of(after, away=away, memory_budget=1)
        return refusals.smallest(lambda: programs(net(), plan, (batches(1)[0],), 1))

    gradients = sum(p.nbytes for p in net().parameters())
    assert least(0) >= least(None) + gradients


def test_weights_that_the_user_loads_win():
    model = zgraph.compile(net(), plan_of())
    for x in batches(3):
        model.train_step(x)
    fresh = net().state_dict()
    model.load_state_dict(fresh)
    model.zgraph.finish()
    assert all(torch.equal(p, fresh[n]) for n, p in model.named_parameters())
    model.train_step(batches(1)[0])
    assert all(torch.equal(p, fresh[n]) for n, p in model.named_parameters())


@pytest.mark.slow
def test_copies_and_recompiled_models_go_on():
    model = zgraph.compile(net(), plan_of())
    for x in batches(3):
        model.train_step(x)
    twin = copy.deepcopy(model)
    model.zgraph.recompile(plan_of())
    more = [[float(m.train_step(x)) for x in batches(6)[3:]] for m in (model, twin)]
    assert more[0] == more[1] == by_definition(6, 0)[0][3:]


def test_an_update_that_fails_is_told_at_the_next_step(monkeypatch):
    model = zgraph.compile(net(), plan_of())
    model.train_step(batches(1)[0])
    (update,) = model.zgraph.runtime.updater.programs.compiled()
    chunk = update.executable.late[-1]
    model.zgraph.runtime.updater.wait()

    def fails(values):
        raise OffloadError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(chunk.executable, "function", fails)
        model.train_step(batches(1)[0])
        with pytest.raises(OffloadError, match="the disk is gone"):
            model.train_step(batches(1)[0])
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for again in (model.zgraph.finish, model.step):
        with pytest.raises(StepError, match="failed half way"):
            again()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    model.zgraph.optimizer.load_state_dict(model.zgraph.optimizer.state_dict())
    with pytest.raises(StepError, match="failed half way"):  # (the weights were not loaded)
        model.step()


def test_an_update_that_communicates_is_refused():
    plan = plan_of(0, mesh={"dp": 2}, optimizer=zgraph.LAMB(lr=0.1))
    program = update_program(net(), plan, 2).program
    made = compile_chunks(program, lambda part: compile_eager(part, {"dp": "no group"}), set(program.params))
    with pytest.raises(PlanError, match="communicates, and can't run late"):
        refuse_late_collectives(made)


def on_ranks() -> list[float]:
    model = zgraph.compile(net(), plan_of(0, mesh={"dp": 2}, grad_clip=0.1))
    losses = [float(model.train_step(x)) for x in batches(6)]
    model.zgraph.finish()
    whole = [p.full_tensor() for p in model.parameters()]
    expected, weights = by_definition(6, 0, 0.1)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert all(torch.allclose(p, w, rtol=1e-5, atol=1e-6) for p, w in zip(whole, weights, strict=True))
    return losses


@pytest.mark.gloo
def test_on_two_ranks(two):
    found = two.run(on_ranks)
    assert found[0] == found[1]

"""What "auto" in a plan's offload comes to: nothing without a budget, and with one as much as it needs."""

from __future__ import annotations

import copy

import models
import pytest
import torch
from torch import nn

import zgraph
from zgraph.build import resolve_auto_offload
from zgraph.build.planned_step import planned_step, update_program
from zgraph.build.resolve_auto_offload import placed
from zgraph.errors import OffloadError, PlanError
from zgraph.plan.offloading import KINDS
from zgraph.program.node import info

ONE = {"mesh": {"dp": 1}, "backend": "eager", "optimizer": zgraph.AdamW(lr=1e-2)}
HOST, DEVICE = torch.device("cpu"), torch.device("cuda")
MIB = 2**20


class Deep(nn.Module):
    """Weights and activations of about the same size, and as large whatever the number of layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        wide = 2048 // layers
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, wide), nn.GELU(), nn.Linear(wide, 64)) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def deep(layers: int = 4) -> Deep:
    torch.manual_seed(0)
    return Deep(layers)


def batches(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(256, 64, generator=generator) for _ in range(count)]


def auto(folder) -> dict[str, object]:
    return {**dict.fromkeys(KINDS, f"auto:{folder}"), "sub_group_bytes": 1}  # (the update of a parameter at a time)


def trained(model: nn.Module, plan: zgraph.Plan) -> tuple[nn.Module, list[float]]:
    model = zgraph.compile(model, plan)
    return model, [float(model.train_step(x)) for x in batches()]


def peak(model: nn.Module) -> int:
    """The forecast peak of forward, backward and update, with the states that stay on the device."""
    (step,) = model.zgraph.programs.values()
    forecast = model.zgraph.forecast()
    return max(sum(forecast.programs[0].peak.values()) + step.outside.held, sum(forecast.programs[1].peak.values()))


# -- places ---------------------------------------------------------------------------------------------------------------
def places(device: torch.device, module: nn.Module | None = None, **fields) -> tuple[str, ...]:
    plan = placed(zgraph.Plan(**{**ONE, **fields}), module or deep(), {"dp": 1}, device)
    return tuple(getattr(plan.offload, kind) for kind in KINDS)


def test_without_a_budget_nothing_goes_anywhere(tmp_path):
    for plan in (zgraph.Plan(**ONE), zgraph.Plan(**ONE, offload=auto(tmp_path))):
        assert placed(plan, deep(), {"dp": 1}, DEVICE) is plan
        assert not plan.offload.tiers()


def test_a_budget_may_use_the_memory_of_a_host_that_is_not_the_device(tmp_path):
    assert places(DEVICE, memory_budget="64MiB") == ("cpu", "cpu", "none")
    assert places(HOST, memory_budget="64MiB") == ("none",) * 3
    disk = f"nvme:{tmp_path}"
    assert places(HOST, memory_budget="64MiB", offload=auto(tmp_path)) == (disk, disk, "none")


def test_a_host_without_room_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(resolve_auto_offload, "host_free", lambda: 4 * MIB)
    assert places(DEVICE, memory_budget="64MiB") == ("none",) * 3
    disk = f"nvme:{tmp_path}"
    assert places(DEVICE, memory_budget="64MiB", offload=auto(tmp_path)) == (disk, disk, "none")


def test_ranks_place_alike(monkeypatch):
    plan = zgraph.Plan(**ONE, memory_budget="64MiB")
    here = placed(plan, deep(), {"dp": 2}, DEVICE, any_rank=lambda mine: True)  # (another rank's host has no room)
    assert here.offload.activations == "none"


def test_what_is_named_stays_where_it_is_named():
    found = places(DEVICE, memory_budget="64MiB", offload={"activations": "none", "optimizer": "cpu"})
    assert found == ("none", "cpu", "none")
    plan = placed(zgraph.Plan(**ONE, memory_budget="64MiB", offload={"optimizer": "cpu"}), deep(), {"dp": 1}, DEVICE)
    assert plan.offload.ratio == 1.0


def test_parameters_go_where_nothing_else_would_fit_and_only_at_stage_3():
    weights = sum(p.nbytes for p in deep().parameters())
    assert places(DEVICE, memory_budget=weights) == ("cpu",) * 3
    assert places(DEVICE, memory_budget=3 * weights) == ("cpu",) * 3  # (groups of an update are 1 MiB at least)
    small = {"sub_group_bytes": 1}
    assert places(DEVICE, memory_budget=3 * weights, offload=small) == ("cpu", "cpu", "none")
    assert places(DEVICE, memory_budget=int(1.4 * weights), offload=small) == ("cpu",) * 3
    stays = {"sub_group_bytes": 1, "update_on": "device"}  # with gradients, which nobody waits for on the host
    assert places(DEVICE, memory_budget=int(2.8 * weights), offload=stays) == ("cpu",) * 3
    assert places(DEVICE, memory_budget=weights, zero=2) == ("cpu", "cpu", "none")
    keep = {"optimizer": "none"}  # the states stay: there is less room
    assert places(DEVICE, memory_budget=5 * weights, offload=keep) == ("cpu", "none", "cpu")


def test_a_plan_without_an_optimizer_has_no_states_to_place():
    assert places(DEVICE, memory_budget="64MiB", optimizer=None) == ("cpu", "none", "none")


# -- what a budget needs ----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_every_budget_is_kept_and_every_loss_is_the_same(tmp_path):
    plain, losses = trained(deep(8), zgraph.Plan(**ONE))
    most = peak(plain)
    shares, seconds = [], []
    for tenths in (10, 8, 6, 4, 3):
        plan = zgraph.Plan(**ONE, memory_budget=most * tenths // 10, offload=auto(tmp_path))
        model, found = trained(deep(8), plan)
        assert found == losses
        assert peak(model) <= most * tenths // 10
        shares.append(model.zgraph.runtime.shares[0])
        seconds.append(model.zgraph.forecast().seconds)
    assert shares[0] == 0 and shares[-1] > 0
    assert model.zgraph.plan.offload.parameters == f"nvme:{tmp_path}"


def updated(case: models.Case, **fields) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The case's model after one step: its loss, its gradients and its new weights."""
    model, found = models.gradients(case, **{**ONE, **fields})
    model.step()
    return model, found | {f"new {n}": p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["gpt2", "t5", "unet"])
@pytest.mark.slow
def test_models_train_alike_under_a_budget_that_takes_states_away(name, tmp_path):
    plain, kept = updated(models.build(name))
    states = sum(t.nbytes for t in plain.zgraph.runtime.updater.states.own().values())
    model, found = updated(models.build(name), memory_budget=peak(plain) - states // 2, offload=auto(tmp_path))
    assert models.equal(kept, found)
    assert peak(model) <= peak(plain) - states // 2


def budget_that_moves_states(folder) -> zgraph.Plan:
    weights = sum(p.nbytes for p in deep().parameters())
    return zgraph.Plan(**ONE, memory_budget=int(3.5 * weights), offload=auto(folder))


@pytest.mark.slow
def test_states_that_are_there_already_move_to_their_place(tmp_path):
    """Loaded before the first call, which decides."""
    plain, _ = trained(deep(), zgraph.Plan(**ONE))
    state, weights = plain.zgraph.optimizer.state_dict(), copy.deepcopy(plain.state_dict())
    model = zgraph.compile(deep(), budget_that_moves_states(tmp_path))
    model.load_state_dict(weights)
    model.zgraph.optimizer.load_state_dict(state)
    ahead = [float(m.train_step(x)) for x in batches() for m in (plain, model)]
    assert ahead[::2] == ahead[1::2]
    states = model.zgraph.runtime.updater.states
    assert model.zgraph.runtime.shares[0] > 0
    disk = model.zgraph.runtime.tiers.of("optimizer").store
    homes = states.options.homes
    assert homes and all(disk.holds(t) == (n.rpartition("/")[0] in homes) for n, t in states.own().items())
    shown = {p: s["exp_avg"] for p, s in model.zgraph.optimizer.state.items()}
    for name, param in model.named_parameters():
        assert shown[param].data_ptr() == states[f"{name}/exp_avg"].data_ptr()


@pytest.mark.slow
def test_recompile_and_copies_keep_what_was_decided(tmp_path):
    plan = budget_that_moves_states(tmp_path)
    model, _ = trained(deep(), plan)
    share = model.zgraph.runtime.shares
    twin = copy.deepcopy(model)
    model.zgraph.recompile(plan)
    assert float(model.train_step(batches()[0])) == float(twin.train_step(batches()[0]))
    assert share[0] > 0 and model.zgraph.runtime.shares == twin.zgraph.runtime.shares == share


@pytest.mark.slow
def test_recompiled_for_a_smaller_budget_more_goes(tmp_path):
    weights = sum(p.nbytes for p in deep().parameters())
    roomy = zgraph.Plan(**ONE, memory_budget=int(20 * weights), offload=auto(tmp_path))
    model, losses = trained(deep(), roomy)
    assert model.zgraph.runtime.shares == (0.0,)
    model.zgraph.recompile(budget_that_moves_states(tmp_path))
    plain, expected = trained(deep(), zgraph.Plan(**ONE))
    assert losses == expected
    assert [float(m.train_step(x)) for m in (model,) for x in batches()] == [
        float(plain.train_step(x)) for x in batches()
    ]
    assert model.zgraph.runtime.shares[0] > 0


@pytest.mark.slow
def test_another_program_of_the_same_inputs_keeps_to_the_share(tmp_path):
    model, _ = trained(deep(), budget_that_moves_states(tmp_path))
    (share,) = model.zgraph.runtime.shares
    (entry,) = model.zgraph.runtime.entries.values()
    assert entry.context.residents.shares == (share,)


def test_a_folder_is_not_touched_without_a_budget():
    zgraph.compile(deep(), zgraph.Plan(**ONE, offload={"activations": "auto:/proc/no/folder"}))


@pytest.mark.slow
def test_an_update_without_ranks_is_that_of_a_step_within_the_budget(tmp_path):
    """Which part of the states is elsewhere depends on the step, and so on its inputs."""
    plan = budget_that_moves_states(tmp_path)
    kinds = {port.name for port, node in update_program(deep(), plan, 1).program.input_items() if info(node).home}
    update = planned_step(deep(), plan, (batches()[0],), 1).update()
    assert update is not None
    assert not kinds and any(info(node).home for _, node in update.program.input_items())


@pytest.mark.slow
def test_a_disk_without_room_for_the_states_is_refused_when_they_are_to_go(tmp_path, monkeypatch):
    from zgraph.offload import files

    model = zgraph.compile(deep(), budget_that_moves_states(tmp_path))
    monkeypatch.setattr(files, "_free", lambda folder: 1000)
    with pytest.raises(OffloadError, match="no room"):
        model.train_step(batches()[0])


def test_a_disk_without_room_for_activations_is_refused_before_the_first_step(tmp_path, monkeypatch):
    from zgraph.offload import files

    model = zgraph.compile(deep(), zgraph.Plan(**ONE, offload={"activations": f"nvme:{tmp_path}"}))
    monkeypatch.setattr(files, "_free", lambda folder: 10_000)
    with pytest.raises(OffloadError, match="no room"):
        model(batches()[0])


@pytest.mark.slow
def test_a_budget_that_nothing_meets_says_what_would(tmp_path):
    with pytest.raises(PlanError, match="the smallest that works is"):
        trained(deep(2), zgraph.Plan(**ONE, memory_budget=100_000, offload=auto(tmp_path)))
    with pytest.raises(PlanError, match="or offload"):
        trained(deep(2), zgraph.Plan(**ONE, memory_budget=100_000))


@pytest.mark.parametrize("place", ["auto:", "disk", "nvme", "cpu:1", "automatic"])
def test_other_places_are_refused(place):
    with pytest.raises(PlanError, match="is no place"):
        zgraph.Plan(offload={"activations": place})

"""A process may destroy its process groups and make others: names of groups come again, for other ranks."""

import contextlib

import pytest
import torch
from fake_world import fake_world
from torch import nn

import zgraph
from zgraph.errors import StepError

PLAN = zgraph.Plan(mesh={"replicate": 2, "dp": 2}, zero=3, backend="eager", hardware="cpu")


def compiled() -> nn.Module:
    torch.manual_seed(0)
    return zgraph.compile(nn.Linear(8, 4), PLAN)


def derived(model: nn.Module) -> list[torch.Tensor]:
    """What operators on a parameter give."""
    weight = model.weight
    return [weight.detach(), weight * 2, weight.clone(), weight.t()]


def step(model: nn.Module) -> None:
    model(torch.ones(2, 8)).sum().backward()


def test_shards_of_a_new_world_have_its_groups():
    with fake_world(4, groups=10):
        model = compiled()
        step(model)
        before = [tensor.device_mesh.get_group("dp").group_name for tensor in derived(model)]
    with fake_world(4):
        model = compiled()
        step(model)
        meshes = [tensor.device_mesh for tensor in derived(model)]
        assert all(mesh is model.weight.device_mesh for mesh in meshes)
        assert not {mesh.get_group("dp").group_name for mesh in meshes} & set(before)


@pytest.mark.parametrize("after", [True, False], ids=["another world", "none"])
def test_a_model_whose_groups_were_destroyed_is_refused(after: bool):
    with fake_world(4):
        model = compiled()
        step(model)
    with (
        fake_world(4) if after else contextlib.nullcontext(),
        pytest.raises(StepError, match="process groups") as error,
    ):
        step(model)
    assert "init_process_group" in str(error.value)

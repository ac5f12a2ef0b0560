"""Scripts for FSDP2 call methods on a model that a compiled one has as well; torch.compile with zgraph as its backend says what to call."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from sweeps import sweep
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

import zgraph
from zgraph.api.fsdp_methods import METHODS
from zgraph.errors import MeshError, StepError, UnsupportedError


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def accumulated(zero: int | None, backend: str = "eager") -> list[torch.Tensor]:
    """Gradients of two micro-batches, of which the first is not reduced: by FSDP2's method, or of one process with all rows."""
    rows = torch.randn(2, 2, 4, 6, generator=torch.Generator().manual_seed(1))
    model = network()
    if zero is None:
        for micro in rows:
            for mine in micro:
                (model(mine).square().mean() / 2).backward()
        return [p.grad for p in model.parameters()]
    zgraph.compile(model, zgraph.Plan(zero=zero, backend=backend))
    rank = dist.get_rank()
    handle = model.unshard(async_op=True)
    handle.wait()
    model.set_requires_gradient_sync(False)
    model(rows[0, rank]).square().mean().backward()
    partial = all(type(p.grad.placements[0]).__name__ == "Partial" for p in model.parameters()) if zero == 1 else True
    model.set_requires_gradient_sync(True)
    model.set_is_last_backward(True)
    model(rows[1, rank]).square().mean().backward()
    model.reshard()
    assert partial
    return [p.grad.full_tensor().clone() for p in model.parameters()]


@pytest.mark.gloo
@sweep("zero, backend", [(1, "eager"), (3, "eager"), (1, "inductor"), (3, "inductor")], quick=(0, 1))
def test_gradients_are_held_back_until_they_are_to_be_reduced(two: Ranks, zero: int, backend: str) -> None:
    expected = accumulated(None)
    for found in two.run(accumulated, zero, backend):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_every_public_method_of_fsdp2_is_known() -> None:
    assert {name for name in vars(FSDPModule) if not name.startswith("_")} <= set(METHODS)


def test_what_changes_numbers_is_done_or_refused_with_what_to_do() -> None:
    model, waited = zgraph.compile(network(), zgraph.Plan(backend="eager")), []
    model.set_gradient_divide_factor(1.0)
    model.set_requires_all_reduce(False)
    model.set_modules_to_forward_prefetch([model[2]])
    model.set_post_optim_event(type("Event", (), {"wait": lambda self: waited.append(self)})())
    assert len(waited) == 1
    with pytest.raises(UnsupportedError, match=r"multiply the loss by 1 / 4"):
        model.set_gradient_divide_factor(4.0)
    for name in ("set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook"):
        with pytest.raises(UnsupportedError, match=f"no use for {name}"):
            getattr(model, name)(print)
    model(torch.ones(2, 6)).sum().backward()
    model.reset_iter_state()
    assert all(p.grad is None for p in model.parameters())


def halves_of_a_reduction() -> str:
    model = zgraph.compile(network(), zgraph.Plan(mesh={"replicate": 2, "dp": 1}, backend="eager"))
    model.set_requires_all_reduce(True)
    try:
        model.set_requires_all_reduce(False)
    except UnsupportedError as error:
        return str(error)
    return ""


@pytest.mark.gloo
def test_half_of_a_reduction_is_not_held_back(two: Ranks) -> None:
    assert all("set_requires_gradient_sync(False) lets both wait" in said for said in two.run(halves_of_a_reduction))


def before_it_is_divided() -> tuple[bool, bool, list[torch.Tensor]]:
    """Gradients of two micro-batches of a model with tensor parallelism, which is divided at its first call; and what was held before and after
    another plan was taken."""
    rows = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))
    plan = zgraph.Plan(mesh={"tp": 2}, zero=1, backend="eager")
    model = zgraph.compile(network(), plan)
    model.set_requires_gradient_sync(False)
    model(rows[0]).square().mean().backward()
    held = model.zgraph.runtime.accumulating
    model.zgraph.recompile(plan.model_copy(update={"recompute": "full"}))
    still = model.zgraph.runtime.accumulating
    model.set_requires_gradient_sync(True)
    model(rows[1]).square().mean().backward()
    return held, still, [p.grad.full_tensor().clone() for p in model.parameters()]


@pytest.mark.gloo
def test_it_is_said_before_weights_are_divided_and_outlives_another_plan(two: Ranks) -> None:
    rows, plain = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1)), network()
    for micro in rows:
        plain(micro).square().mean().backward()
    for held, still, found in two.run(before_it_is_divided):
        assert held and still
        for one, param in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(one, param.grad, rtol=1e-5, atol=1e-7)


def by_a_given_mesh(ranks: list[int]) -> tuple[bool, list[torch.Tensor]]:
    """Whether the model has this very mesh, and its gradients."""
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp",))
    model = zgraph.compile(network(), zgraph.Plan(zero=3, backend="eager"), mesh=mesh)
    rows = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))
    model(rows[dist.get_rank()]).square().mean().backward()
    return model.zgraph.mesh is mesh, [p.grad.full_tensor().clone() for p in model.parameters()]


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [[0, 1], [1, 0]])
def test_a_mesh_that_is_given_is_the_models_in_whatever_order_its_ranks_are(two: Ranks, ranks: list[int]) -> None:
    rows, plain = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1)), network()
    for mine in rows:
        (plain(mine).square().mean() / 2).backward()
    for is_given, found in two.run(by_a_given_mesh, ranks):
        assert is_given
        for one, param in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(one, param.grad, rtol=1e-5, atol=1e-7)


def by_a_mesh_of_other_names() -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    try:
        zgraph.compile(network(), zgraph.Plan(backend="eager"), mesh=mesh)
    except MeshError as error:
        return str(error)
    return ""


@pytest.mark.gloo
def test_a_mesh_of_other_names_is_told_those_of_a_plan(two: Ranks) -> None:
    assert all(
        "calls no dimension 'shard': they are pp, replicate, dp" in said for said in two.run(by_a_mesh_of_other_names)
    )


def test_copies_have_methods_of_their_own_and_a_models_own_stay() -> None:
    class Own(nn.Linear):
        def reshard(self) -> str:
            return "mine"

    model = zgraph.compile(Own(2, 2), zgraph.Plan(backend="eager"))
    twin = copy.deepcopy(model)
    assert model.reshard() == twin.reshard() == "mine"
    twin.set_requires_gradient_sync(False)
    assert twin.zgraph.runtime.accumulating and not model.zgraph.runtime.accumulating
    assert all(callable(getattr(twin, name)) for name in METHODS)


def test_a_part_of_the_model_is_refused() -> None:
    model = zgraph.compile(network(), zgraph.Plan(backend="eager"))
    with pytest.raises(UnsupportedError, match="leave recurse out"):
        model.set_requires_gradient_sync(False, recurse=False)


def stages_refuse() -> str:
    rows = torch.randn(4, 6)
    plan = zgraph.Plan(mesh={"pp": 2}, micro_batches=2, backend="eager", optimizer=zgraph.SGD(lr=0.1))
    model = zgraph.compile(network(), plan, inputs=(rows,), loss_fn=lambda out: out.square().mean())
    try:
        model.set_requires_gradient_sync(False)
    except StepError as error:
        return str(error)
    return ""


@pytest.mark.gloo
@pytest.mark.slow
def test_a_pipeline_refuses_it(two: Ranks) -> None:
    assert all("micro_batches" in said for said in two.run(stages_refuse))


def test_torch_compile_with_zgraph_as_its_backend_says_what_to_call() -> None:
    with pytest.raises(BackendCompilerFailed, match=r"is no backend of torch\.compile"):
        torch.compile(network(), backend="zgraph")(torch.ones(1, 6))


@pytest.mark.slow
def test_it_is_said_in_a_process_that_has_not_imported_zgraph() -> None:
    code = "import torch; torch.compile(torch.nn.Linear(2, 2), backend='zgraph')(torch.ones(1, 2))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "zgraph.compile(model, zgraph.Plan(" in done.stderr

"""Scripts for FSDP2 call methods on a model that a compiled one has as well; torch.compile with zgraph as its backend says what to call."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import zgraph
from zgraph.api.fsdp_methods import METHODS
from zgraph.errors import StepError, UnsupportedError


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def accumulated(zero: int | None) -> list[torch.Tensor]:
    """Gradients of two micro-batches, of which the first is not reduced: by FSDP2's method, or of one process with all rows."""
    rows = torch.randn(2, 2, 4, 6, generator=torch.Generator().manual_seed(1))
    model = network()
    if zero is None:
        for micro in rows:
            for mine in micro:
                (model(mine).square().mean() / 2).backward()
        return [p.grad for p in model.parameters()]
    zgraph.compile(model, zgraph.Plan(zero=zero, backend="eager"))
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
@pytest.mark.parametrize("zero", [1, 3])
def test_gradients_are_held_back_until_they_are_to_be_reduced(two: Ranks, zero: int) -> None:
    expected = accumulated(None)
    for found in two.run(accumulated, zero):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


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
    code = "import torch; torch.compile(torch.nn.Linear(2, 2), backend='zgraph')(torch.ones(1, 2))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "zgraph.compile(model, zgraph.Plan(" in done.stderr
    with pytest.raises(BackendCompilerFailed, match=r"is no backend of torch\.compile"):
        torch.compile(network(), backend="zgraph")(torch.ones(1, 6))

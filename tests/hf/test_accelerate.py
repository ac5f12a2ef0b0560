"""accelerate, which knows nothing of zgraph, prepares a compiled model on several ranks: it wraps nothing, and drops no precision in silence."""

from __future__ import annotations

import pytest
import torch
from ranks import Ranks
from torch import nn
from trainers import as_launched

import zgraph
from zgraph.errors import ModelError

pytest.importorskip("accelerate")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, generator=generator) for _ in range(24)]


def loop(plan: zgraph.Plan | None, mixed_precision: str = "no") -> list[float]:
    """Losses over all ranks, and norms, of a loop with accumulation and clipping."""
    from accelerate import Accelerator

    with as_launched():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=mixed_precision)
        made = model() if plan is None else zgraph.compile(model(), plan)
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2, foreach=False)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        loader = torch.utils.data.DataLoader(rows(), batch_size=2)
        made, optimizer, loader, schedule = accelerator.prepare(made, optimizer, loader, schedule)
        assert plan is None or accelerator.unwrap_model(made) is made
        found = []
        for x in loader:
            with accelerator.accumulate(made):
                loss = made(x).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    found.append(float(accelerator.clip_grad_norm_(made.parameters(), 0.1)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            found.append(float(accelerator.gather(loss.detach()).mean()))
        return found


@pytest.mark.gloo
@pytest.mark.parametrize("zero", [0, 3])
def test_a_loop_is_that_of_ddp(two: Ranks, zero):
    plain = two.run(loop, None)
    for one, other in zip(two.run(loop, zgraph.Plan(backend="eager", zero=zero)), plain, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-7)


@pytest.mark.gloo
def test_a_mixed_precision_that_the_plan_has_not_is_refused(two: Ranks):
    for outcome in two.attempt(loop, zgraph.Plan(backend="eager"), "bf16", keep=True):
        assert isinstance(outcome.error, ModelError), outcome.traceback
        assert "mixed_precision is 'bf16'" in str(outcome.error) and 'precision="bf16"' in str(outcome.error)
    assert len(two.run(loop, zgraph.Plan(backend="eager", precision="bf16"), "bf16")) == 2

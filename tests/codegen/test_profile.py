"""A profile of a step names modules and passes."""

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import zgraph


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def test_a_profiled_step_has_ranges_for_modules_and_equals_an_unprofiled_one() -> None:
    torch.manual_seed(0)
    model = zgraph.compile(Net(), zgraph.Plan(backend="eager"))
    x = torch.randn(4, 8)
    plain = model(x)
    plain.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU]) as run:
        loss = model(x)
        loss.backward()
    names = {event.key for event in run.key_averages()}
    assert {"zgraph:forward up", "zgraph:forward down", "zgraph:backward up", "zgraph:train0.forward"} <= names
    assert torch.equal(loss, plain)
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


def test_compiling_shows_each_pass_in_a_profile() -> None:
    model = zgraph.compile(Net(), zgraph.Plan(backend="eager"))
    with profile(activities=[ProfilerActivity.CPU]) as run:
        model(torch.randn(4, 8))
    names = {event.key for event in run.key_averages()}
    assert {"zgraph:pass cleanup", "zgraph:pass reduce_gradients"} <= names

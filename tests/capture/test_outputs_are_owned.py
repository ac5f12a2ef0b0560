"""An output shares memory with what the plain model's shares it with, and with nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import zgraph


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.register_buffer("k", torch.ones(4))
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x):
        before = self.k.clone()
        self.last.copy_(self.k)
        self.k.copy_(x[0].detach())
        h = x @ self.w + self.b
        return {
            "input": x * 1,
            "weight": self.w.clone(),
            "before": before,
            "one": h + 0,
            "other": h.clone(),
            "view": (h * 2).view(-1),
            "same": (h * 3, h * 3),
        }


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_writes_to_outputs_reach_nothing_else(backend):
    plain = Outputs()
    model = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(backend=backend))
    found = []
    for m in (plain, model):
        for number in range(2):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(number))
            out = m(x)
            kept = copy.deepcopy([out["before"].detach(), out["input"], out["weight"].detach()])
            loss = sum(out[n].square().sum() for n in ("one", "other", "view")) + out["same"][0].sum()
            out["input"].zero_()
            with torch.no_grad():
                out["weight"].zero_()
            out["before"].mul_(5)
            out["same"][1].mul_(2)
            loss = loss + out["same"][0].square().sum()
            loss.backward()
            found.append([*kept, x, out["same"][0].detach(), *(v.clone() for v in m.state_dict().values())])
        found.append([p.grad for p in m.parameters()])
    torch.testing.assert_close(found[3:], found[:3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_an_output_that_is_a_view_may_be_written_to(backend):
    class View(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.l = nn.Linear(4, 4)

        def forward(self, x):
            return self.l(x).view(2, -1)

    found = []
    for model in (View(), zgraph.compile(View(), zgraph.Plan(backend=backend))):
        out = model(torch.ones(4, 4))
        out[0].zero_()
        out.mul_(3).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found)


def test_an_output_that_is_an_input_only_in_the_program_is_a_copy():
    """Inductor drops a product with ones, and a sum with zeros."""

    class Neutral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return x * torch.ones(4, 4), self.w + torch.zeros(4, 4), x @ self.w

    found = []
    for model in (Neutral(), zgraph.compile(Neutral(), zgraph.Plan(backend="inductor"))):
        for _ in range(2):
            x = torch.ones(4, 4)
            product, total, last = model(x)
            product.zero_()
            with torch.no_grad():
                total.zero_()
            last.sum().backward()
            found.append([x, model.w.detach().clone(), model.w.grad.clone()])
    torch.testing.assert_close(found[2:], found[:2])


class Updates(nn.Module):
    """The backward reads a buffer as it was before forward updated it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(1.0, 5.0))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        y = (self.w * self.scale.clone()).sin() * x
        self.scale.mul_(2)
        return y.sum()


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_buffer_that_forward_updates_is_saved_as_it_was(backend):
    plain, model = Updates(), zgraph.compile(Updates(), zgraph.Plan(backend=backend))
    for number in range(2):
        x = torch.randn(4, generator=torch.Generator().manual_seed(number))
        for m in (plain, model):
            m(x).backward()
        torch.testing.assert_close(model.w.grad, plain.w.grad)
        torch.testing.assert_close(model.scale, plain.scale)

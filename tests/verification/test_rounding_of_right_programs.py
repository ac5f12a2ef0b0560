"""Right programs are not called wrong: whatever strides tangents have, and where numbers are nothing but rounding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zgraph
from zgraph.errors import ModelError


class Turned(nn.Module):
    """An output, and so a tangent, that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(5, 6), nn.GroupNorm(1, 6)

    def forward(self, x):
        return self.norm(self.layer(x).transpose(1, 2)).transpose(1, 2)


class Flat(nn.Module):
    """The mean of normalised squares does not depend on the weights before it: their gradients are rounding, amplified."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.layer, self.after = nn.BatchNorm1d(5), nn.Linear(5, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        return self.after(self.layer(self.before(x))).square().mean()


class NearZero(nn.Module):
    """Buffers that are zero but for rounding, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("centred", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        x = self.layer(x)
        with torch.no_grad():
            self.mean.add_(x.mean(0) - x.sum(0) / len(x))
            self.centred.lerp_((x - x.mean(0)).mean(0), 0.1)
            self.count.add_(1)
        return x.square().mean()


WEIGHTS = torch.randn(8, 8, 6, generator=torch.Generator().manual_seed(3))
LOSSES = {
    "contiguous": lambda output: (output * WEIGHTS[: len(output)]).sum(),
    "expanded": lambda output: output.sum() + output[..., 0].mean(),
    "transposed": lambda output: (output.transpose(1, 2) * WEIGHTS[: len(output)].transpose(1, 2).contiguous()).sum(),
}


def verify(model, backend, width, loss_fn=None):
    torch.manual_seed(1)
    return zgraph.verify(model(), zgraph.Plan(backend=backend), 2, (torch.randn(4, *width),), loss_fn)


@pytest.mark.parametrize("loss", list(LOSSES))
def test_tangents_of_any_strides(loss):
    found = verify(Turned, "eager", (8, 5), LOSSES[loss])
    assert found.exact, str(found)


@pytest.mark.parametrize("model", [Flat, NearZero])
def test_numbers_that_are_rounding(model):
    torch.manual_seed(0)
    x = torch.randn(16, 5)
    torch.manual_seed(1)
    found = zgraph.verify(model(), zgraph.Plan(), 2, (x,))
    assert found.ok, str(found)


class Beside(nn.Module):
    """An output that is nothing but rounding, beside one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.norm(x.transpose(1, 2)).transpose(1, 2) * 1.5
        return self.head(h), h.mean()


def test_numbers_that_are_rounding_in_double_precision():
    torch.manual_seed(0)
    x = torch.randn(8, 8, 8, dtype=torch.float64)
    plan = zgraph.Plan(backend="eager", mesh={"cp": 2})
    found = zgraph.verify(Beside().double(), plan, 2, (x,), lambda out: out[0].square().mean())
    assert found.ok, str(found)


def test_what_is_wrong_is_wrong_all_the_same(monkeypatch):
    """A fault in a model that rounds much is found: it is larger than that."""
    from zgraph.verification.virtual_ranks import run_virtual

    def larger(value):
        return value * 1.01 if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def off(program, given, states=None, watch=None):
        return [tuple(map(larger, row)) for row in run_virtual(program, given, states)]

    monkeypatch.setattr("zgraph.verification.virtual_step.run_virtual", off)
    torch.manual_seed(1)
    assert not zgraph.verify(NearZero(), zgraph.Plan(backend="eager"), 2, (torch.randn(16, 5),)).ok


def test_a_model_that_can_not_be_copied_is_refused():
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.rows = self.a.weight[:2]

        def forward(self, x):
            return (self.a(x)[:, :2] @ self.rows).square().mean()

    with pytest.raises(ModelError, match="can't be copied"):
        zgraph.verify(Held(), zgraph.Plan(backend="eager"), 1, (torch.ones(2, 4),))


class Stages(nn.Module):
    """Layers of which two are divided, and a loss that does not depend on what comes out of them, but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last, self.norm = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def hidden(self, x):
        return self.last(self.down(self.up(x).relu()))

    def forward(self, x):
        return self.norm(self.hidden(x)).square().mean()


class Centred(Stages):
    def forward(self, x):
        hidden = self.hidden(x) + 30
        return hidden.softmax(-1).sum(-1).mean() + (hidden - hidden.mean(0, keepdim=True)).mean()


PIPELINE = zgraph.Plan(backend="eager", mesh={"pp": 2, "tp": 2}, micro_batches=2, tensor_parallel="auto")


@pytest.mark.parametrize("model", [Stages, Centred])
def test_numbers_that_are_rounding_in_a_pipeline(model):
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    torch.manual_seed(1)
    found = zgraph.verify(model(), PIPELINE, 4, (x,))
    assert found.ok and not found.exact, str(found)

"""What is written to between a forward and its backward is noticed where the backward reads it, as autograd notices it, and only there."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from sweeps import product
from torch import nn
from torch.nn.functional import linear

import zgraph

PHRASE = "modified by an inplace operation"


class Net(nn.Module):
    def __init__(self, of=torch.sigmoid) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l = nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.register_buffer("scale", torch.rand(4) + 1)
        self.register_buffer("shift", torch.rand(4))  # (no backward reads it)
        self.bank = torch.rand(4) + 1
        self.of = of

    def forward(self, x):
        return self.of(self.l(linear(x * self.l.weight[0], self.frozen)) * self.scale * self.bank + self.shift)


def x_of(seed=1):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def outcome(model, change, of):
    """The gradients after a change between forward and backward, or that it was refused."""
    x = x_of()
    output = model(x)
    with torch.no_grad() if change != "output" else torch.enable_grad():
        if change == "output":
            output = output.mul_(2)
        elif change == "input":
            x.zero_()
        elif change != "nothing":
            {
                "frozen": model.frozen,
                "buffer": model.scale,
                "shift": model.shift,
                "attribute": model.bank,
                "weight": model.l.weight,
            }[change].mul_(2)
    try:
        output.sum().backward()
    except RuntimeError as error:
        assert PHRASE in str(error)
        return "refused"
    return [p.grad for p in model.parameters() if p.requires_grad]


@product(
    "of, change",
    [torch.sigmoid, torch.relu, torch.tanh, torch.exp],
    ["nothing", "output", "input", "frozen", "buffer", "shift", "attribute", "weight"],
    together=1,
)
def test_a_write_before_the_backward_is_what_it_is_in_plain_pytorch(of, change):
    plain, model = Net(of), zgraph.compile(Net(of), zgraph.Plan(backend="eager"))
    mine, its = outcome(model, change, of), outcome(plain, change, of)
    assert (mine == "refused") == (its == "refused")
    if its != "refused":
        torch.testing.assert_close(mine, its)


@pytest.mark.parametrize("change", ["nothing", "input", "buffer", "attribute"])
def test_a_write_to_what_a_saved_value_is_a_view_of_is_refused(change):
    """The program saves the view; the user writes to what it is of."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.w = nn.Parameter(torch.randn(4, 3))
            self.register_buffer("b", torch.randn(4, 3))
            self.bank = torch.randn(3, 4)

        def forward(self, x):
            return self.w * x.t() + self.w * self.b[:1] + self.w * self.bank.view(4, 3)

    model = zgraph.compile(Views(), zgraph.Plan(backend="eager"))
    x = x_of()
    loss = model(x).sum()
    with torch.no_grad():
        if change != "nothing":
            {"input": x, "buffer": model.b, "attribute": model.bank}[change].mul_(2)
    if change == "nothing":
        loss.backward()
    else:
        with pytest.raises(zgraph.errors.StepError, match=PHRASE):
            loss.backward()


def test_inductor_never_computes_from_what_was_overwritten():
    """A loader fills one static buffer; Inductor computes again from it what plain PyTorch has saved."""

    class Bytes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))

        def forward(self, x):
            return torch.tanh(x.float() / 255 * self.w + self.b)

    plain = Bytes()
    model = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(backend="inductor"))
    x = torch.randint(0, 255, (3, 4), dtype=torch.uint8)
    loss = model(x).mean()
    x.zero_()
    with pytest.raises(zgraph.errors.StepError, match=PHRASE) as refused:
        loss.backward()
    assert "'x'" in str(refused.value)
    for m in (model, plain):
        x.fill_(7)
        m(x).mean().backward()
        x.fill_(9)
        m(x).mean().backward()
    torch.testing.assert_close(model.w.grad, plain.w.grad)


def test_several_forwards_before_their_backwards_are_no_change():
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
            self.register_buffer("count", torch.zeros(4))

        def forward(self, x):
            self.count.add_(1)
            return (self.norm(self.l(x)) * self.count.clone()).square().mean()

    torch.manual_seed(0)
    plain = Norms()
    model = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(backend="eager"))
    for m in (plain, model):
        losses = [m(x_of(seed)) for seed in range(2)]
        losses[0].backward(retain_graph=True)
        losses[0].backward()
        losses[1].backward()
        with torch.no_grad():
            m.eval()(x_of())
        m.train()(x_of()).backward()
    for mine, its in zip([*model.parameters(), *model.buffers()], [*plain.parameters(), *plain.buffers()], strict=True):
        torch.testing.assert_close(mine.detach(), its.detach())
        torch.testing.assert_close(mine.grad, its.grad)


def test_a_parameter_that_the_backward_does_not_read_may_change():
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

        def forward(self, x):
            return (x * self.a + self.b).sum()

    model = zgraph.compile(Shift(), zgraph.Plan(backend="eager"))
    loss = model(x_of())
    with torch.no_grad():
        model.b.add_(1)
    loss.backward()
    torch.testing.assert_close(model.a.grad, x_of().sum(0))


def test_a_forward_without_its_backward_leaves_nothing():
    """An output that is a saved value too does not hold itself."""
    model = zgraph.compile(Net(torch.sigmoid), zgraph.Plan(backend="eager"))
    gc.collect()
    gc.disable()
    try:
        output = model(x_of())
        held = weakref.ref(output.grad_fn)
        del output
        assert held() is None
    finally:
        gc.enable()

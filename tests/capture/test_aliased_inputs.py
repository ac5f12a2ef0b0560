"""Tensors of a call that are one, or lie in one memory: right, or refused where the forward writes to one of them."""

from __future__ import annotations

import pytest
import torch
from sweeps import sweep
from torch import nn

import zgraph
from zgraph.errors import SignatureError


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 4)
        self.register_buffer("k", torch.ones(2, 4))

    def forward(self, x, y):
        x.add_(1)
        self.k.add_(x.detach())
        return (self.a(x) * y).sum() + self.k.sum()


class Nested(Writes):
    def forward(self, given):
        return super().forward(given["x"], given["more"][0])


def outcome(model, call):
    """A call's loss and gradient after one with two tensors, or that it was refused."""
    first = torch.ones(2, 4)
    call(model, first, first.clone()).backward()
    model.zero_grad()
    c = torch.arange(16.0).view(4, 4).clone()
    try:
        loss = call(model, c[:2], None)
    except SignatureError as error:
        assert "shares memory with" in str(error)
        return "refused"
    loss.backward()
    return loss.detach(), model.a.weight.grad, c, model.k


def two(model, x, y, other):
    return model(x, other(x) if y is None else y)


CALLS = {
    "same": lambda m, x, y: two(m, x, y, lambda x: x),
    "buffer": lambda m, x, y: two(m, x, y, lambda x: m.k),
    "buffer first": lambda m, x, y: m(m.k, x) if y is None else m(x, y),
    "apart": lambda m, x, y: two(m, x, y, lambda x: x._base[2:]),
    "view": lambda m, x, y: two(m, x, y, lambda x: x[:]),
    "reversed view": lambda m, x, y: m(x.view(2, 4), x) if y is None else m(x, y),
    "overlapping": lambda m, x, y: two(m, x, y, lambda x: x._base[1:3]),
    "view of a buffer": lambda m, x, y: two(m, x, y, lambda x: m.k[:]),
}
RIGHT = ("same", "buffer", "buffer first", "apart")


@sweep("how", CALLS, quick=4)
def test_a_call_with_aliased_tensors_is_right_or_refused(how):
    found = [outcome(m, CALLS[how]) for m in (zgraph.compile(Writes(), zgraph.Plan(backend="eager")), Writes())]
    if how in RIGHT:
        torch.testing.assert_close(*found)
    else:
        assert found[0] == "refused"


def test_one_tensor_twice_in_a_dict():
    def call(m, x, y):
        return m({"x": x, "more": [x if y is None else y]})

    found = [outcome(m, call) for m in (zgraph.compile(Nested(), zgraph.Plan(backend="eager")), Nested())]
    torch.testing.assert_close(*found)


def test_inductor_with_one_tensor_twice():
    found = [outcome(m, CALLS["same"]) for m in (zgraph.compile(Writes(), zgraph.Plan(backend="inductor")), Writes())]
    torch.testing.assert_close(*found)


def test_aliased_inputs_that_nobody_writes_to_are_no_matter():
    class Reads(Writes):
        def forward(self, x, y):
            return (self.a(x) * y).sum()

    model, plain = zgraph.compile(Reads(), zgraph.Plan(backend="eager")), Reads()
    c = torch.arange(8.0).view(2, 4)
    for call in ((c, c), (c, c[:]), (c, plain.k), (c, c.clone())):
        torch.testing.assert_close(model(*call), plain(*call))


def test_buffers_that_view_each_other_are_refused_where_one_is_written():
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.register_buffer("k", torch.ones(4))
            self.register_buffer("v", self.k[:2])

        def forward(self, x):
            self.k.add_(1)
            return (self.a(x) * self.k).sum() + self.v.sum()

    model = zgraph.compile(Views(), zgraph.Plan(backend="eager"))
    with pytest.raises(SignatureError, match=r"writes to self\.k, which shares memory with self\.v"):
        model(torch.ones(2, 4))
    with pytest.raises(SignatureError, match=r"writes to self\.k, which shares memory with self\.v"):
        zgraph.verify(Views(), zgraph.Plan(backend="eager"), 2, (torch.ones(2, 4),))


def test_a_parameter_given_as_an_input_gets_its_whole_gradient():
    class Takes(Writes):
        def forward(self, x, w):
            return (self.a(x) @ w).square().sum()

    model, plain = zgraph.compile(Takes(), zgraph.Plan(backend="eager")), Takes()
    for m in (model, plain):
        m(torch.ones(2, 4), torch.eye(4)).backward()
        m(torch.ones(2, 4), m.a.weight).backward()
    torch.testing.assert_close(model.a.weight.grad, plain.a.weight.grad)

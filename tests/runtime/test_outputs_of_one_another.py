"""Gradients of outputs that other outputs are computed of, and of tensors that live from one call to the next."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import zgraph
from zgraph.errors import UnsupportedError

EAGER = zgraph.Plan(backend="eager")
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Both(nn.Module):
    """A loss, and the hidden values that it is computed of; `cut`: by values that no gradient goes through."""

    def __init__(self, cut: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.cut = nn.Linear(4, 4), cut

    def forward(self, x):
        hidden = self.layer(x)
        return ((hidden.detach() if self.cut else hidden) * self.layer.bias).pow(2).mean(), hidden


ASKED = {"kept": lambda t: t.retain_grad(), "hook": lambda t: t.register_hook(lambda g: g * 2)}


@pytest.mark.parametrize("asked", ASKED)
def test_the_whole_gradient_of_an_output_that_another_is_computed_of_is_refused(asked):
    loss, hidden = zgraph.compile(Both(), EAGER)(X)
    ASKED[asked](hidden)
    with pytest.raises(UnsupportedError, match="output 1 of the model"):
        (loss + hidden.mean()).backward()


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("cut", [True, False])
def test_the_gradient_of_an_output_is_that_of_plain_pytorch_where_it_comes_from_outside_alone(asked, cut):
    plain, mine = Both(cut), zgraph.compile(Both(cut), EAGER)
    seen = []
    for model in (plain, mine):
        loss, hidden = model(X)
        ASKED[asked](hidden)
        (loss + hidden.mean() if cut else hidden.mean()).backward()
        seen.append(hidden.grad)
    assert (seen[0] is None) == (seen[1] is None)
    if seen[0] is not None:
        torch.testing.assert_close(seen[1], seen[0])
    torch.testing.assert_close(mine.layer.weight.grad, plain.layer.weight.grad)


class Remembers(nn.Module):
    """What the call before gave goes into the next one without a gradient, and is kept with its graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.memory = nn.Linear(4, 4), None

    def forward(self, x):
        hidden = self.layer(x)
        if self.memory is not None:
            hidden = hidden + self.memory.detach()
        self.memory = hidden
        return hidden.tanh()


def test_what_is_kept_with_its_graph_and_read_without_it_holds_no_graph():
    plain, mine = Remembers(), zgraph.compile(Remembers(), EAGER)
    graphs = []
    for _ in range(4):
        for model in (plain, mine):
            model.zero_grad()
            model(X).pow(2).mean().backward()
        torch.testing.assert_close(mine.layer.weight.grad, plain.layer.weight.grad)
        graphs.append(weakref.ref(mine.memory))
    gc.collect()
    assert [g() is not None for g in graphs[1:]] == [
        False,
        False,
        True,
    ]  # (the first is an example that the capture has)


def test_a_weight_that_forward_gives_other_memory_is_refused():
    class Renormed(Both):
        def forward(self, x):
            self.layer.weight.data = nn.functional.normalize(self.layer.weight.data)
            return super().forward(x)

    with pytest.raises(UnsupportedError, match=r"other memory"):
        zgraph.compile(Renormed(), EAGER)(X)

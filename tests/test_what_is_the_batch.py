"""What `train_step` would cut into micro-batches though it is no batch is refused; batches are cut as they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zgraph
from zgraph.errors import StepError


class Recurrent(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        torch.manual_seed(1)
        self.cell = nn.LSTM(4, 3, batch_first=batch_first)

    def forward(self, x):
        return self.cell(x)[0].pow(2).mean()


class Weighted(nn.Module):
    """`weights` is read in a way of the model's, beside `x`."""

    def __init__(self, read):
        super().__init__()
        torch.manual_seed(1)
        self.out, self.read = nn.Linear(4, 8), read

    def forward(self, x, labels, weights):
        return self.read(self.out(x), labels, weights)


def train(model, *inputs, micro_batches=2, backend="eager"):
    zgraph.compile(model, zgraph.Plan(backend=backend, micro_batches=micro_batches))
    model.train_step(*inputs)
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_sequence_that_comes_first_is_not_cut(backend):
    with pytest.raises(StepError, match="is no batch: forward takes its elements"):
        train(Recurrent(False), torch.randn(4, 2, 4), backend=backend)


def test_a_batch_that_comes_first_is_cut():
    x, plain = torch.randn(4, 3, 4), Recurrent(True)
    plain(x).backward()
    torch.testing.assert_close(train(Recurrent(True), x), [p.grad for p in plain.parameters()])


NO_BATCH = {
    "apart": lambda h, y, w: h.pow(2).mean() * w.mean() + w[0] * h.mean(),
    "features": lambda h, y, w: (h * w).pow(2).mean(),
    "classes": lambda h, y, w: F.cross_entropy(h * w.exp(), y),
}
BATCH = {
    "rows": lambda h, y, w: (F.cross_entropy(h, y, reduction="none") * w).mean(),
    "columns": lambda h, y, w: (h * w[:, None]).pow(2).mean(),
    "masked": lambda h, y, w: torch.where(w.view(-1, 1) > 0, h, 0.0).pow(2).mean(),
}


@pytest.mark.parametrize("kind", NO_BATCH)
def test_what_has_the_batchs_size_by_coincidence_is_not_cut(kind):
    with pytest.raises((StepError, zgraph.errors.ZgraphError)):
        train(Weighted(NO_BATCH[kind]), torch.randn(8, 4), torch.arange(8), torch.arange(8.0))


@pytest.mark.parametrize("kind", BATCH)
def test_what_belongs_to_the_batch_is_cut(kind):
    inputs, plain = (torch.randn(8, 4), torch.arange(8), torch.arange(8.0)), Weighted(BATCH[kind])
    plain(*inputs).backward()
    torch.testing.assert_close(train(Weighted(BATCH[kind]), *inputs), [p.grad for p in plain.parameters()])

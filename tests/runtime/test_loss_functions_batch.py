"""What `train_step` cuts for a loss function is the batch, by what the loss function does with it."""

import pytest
import torch
import torch.nn.functional as F
from sweeps import sweep
from torch import nn

import zgraph
from zgraph.errors import StepError

ROWS = 8
Y, X = torch.randint(0, 5, (ROWS,)), torch.randn(ROWS, 5)
ONES = torch.ones(ROWS)


def step(loss, *others):
    torch.manual_seed(0)
    plan = zgraph.Plan(backend="eager", zero=0, mesh={"dp": 1}, micro_batches=4, optimizer=zgraph.SGD(lr=0.1))
    model = zgraph.compile(nn.Linear(6, 5), plan, loss_fn=loss)
    return model.train_step(torch.randn(ROWS, 6), *others)


@pytest.mark.parametrize(
    ("loss", "others"),
    [
        (lambda out, y, centers: (out - centers[y % 2]).square().mean(), (Y, torch.randn(ROWS, 5))),
        (lambda out, y, table: F.mse_loss(out, F.embedding(y % 2, table)), (Y, torch.randn(ROWS, 5))),
    ],
)
def test_a_tensor_that_is_no_part_of_the_batch_is_refused(loss, others):
    with pytest.raises(StepError, match=r"an argument of loss_fn .* has the size of the batch"):
        step(loss, *others)


@sweep(
    "loss, others",
    [
        (F.cross_entropy, (Y,)),
        (lambda out, y, w: (F.cross_entropy(out, y, reduction="none") * w).mean(), (Y, ONES)),
        (lambda out, y: -(F.one_hot(y, 5) * out.log_softmax(-1)).sum(1).mean(), (Y,)),
        (lambda out, y: -out.log_softmax(-1).gather(1, y[:, None]).mean(), (Y,)),
        (lambda out, y: -out.log_softmax(-1)[torch.arange(len(y)), y].mean(), (Y,)),
        (lambda out, t: F.cross_entropy(F.normalize(out) @ F.normalize(t).T, torch.arange(len(out))), (X,)),
        (lambda out, t, y: F.cosine_embedding_loss(out, t, y), (X, ONES)),
        (lambda out, a, b: F.triplet_margin_loss(out, a, b), (X, X.flip(0))),
        (lambda out, m: (out * m[:, None]).sum() / m.sum(), (ONES,)),
        (lambda out, m: out[m.bool()].square().mean(), (ONES,)),
        (lambda out, y: F.cross_entropy(out, y) * (1 if y.float().mean().item() > 0 else 2), (Y,)),
        (lambda out, y: out.square().sum() / len(y), (Y,)),
        (lambda out, y, counts: F.cross_entropy(out, y, reduction="sum") / (counts * 2).sum(), (Y, ONES)),
    ],
    quick=5,
)
def test_rows_of_the_batch_are_cut(loss, others):
    step(loss, *others)

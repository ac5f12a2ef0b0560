"""`loss_average="token"` counts the targets that the model's own loss counts, wherever that is called."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zgraph
from zgraph.errors import StepError


class Net(nn.Module):
    """`loss(logits, labels)` is the model's; None gives the logits alone."""

    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(1)
        self.words, self.out, self.loss = nn.Embedding(6, 4), nn.Linear(4, 6), loss

    def forward(self, x, labels):
        logits = self.out(self.words(x)).flatten(0, 1)
        return self.loss(logits, labels.flatten()) if self.loss is not None else logits


def batch(ignored):
    torch.manual_seed(2)
    labels = torch.randint(1, 6, (4, 5))
    labels[:2, 1:] = ignored
    return torch.randint(0, 6, (4, 5)), labels


LOSSES = {
    "function": lambda a, b: F.cross_entropy(a, b, ignore_index=0),
    "in order": lambda a, b: F.cross_entropy(a, b, None, None, 0),
    "module": nn.CrossEntropyLoss(ignore_index=0),
    "likelihood": lambda a, b: F.nll_loss(a.log_softmax(-1), b, ignore_index=0),
    "checkpointed": lambda a, b: checkpoint(lambda c: F.cross_entropy(c, b, ignore_index=0), a, use_reentrant=False),
}


def gradients(loss, plan, loss_fn=None, ignored=0):
    model = zgraph.compile(Net(loss), plan, loss_fn=loss_fn)
    x, labels = batch(ignored)
    model.train_step(x, labels)
    return [p.grad for p in model.parameters()]


def expected(loss, ignored=0):
    model = Net(loss)
    model(*batch(ignored)).backward()
    return [p.grad for p in model.parameters()]


def by_token(backend="eager", **more):
    return zgraph.Plan(backend=backend, micro_batches=2, loss_average="token", **more)


@pytest.mark.parametrize("kind", LOSSES)
def test_a_models_own_ignore_index_is_what_does_not_count(kind):
    torch.testing.assert_close(gradients(LOSSES[kind], by_token()), expected(LOSSES[kind]))


@pytest.mark.slow
def test_inductor_counts_alike():
    torch.testing.assert_close(gradients(LOSSES["module"], by_token("inductor")), expected(LOSSES["module"]))


def test_the_loss_function_beside_the_model_is_looked_at():
    found = gradients(None, by_token(), lambda logits, x, labels: LOSSES["function"](logits, labels.flatten()))
    torch.testing.assert_close(found, expected(LOSSES["function"]))


def test_a_hundred_below_zero_is_ignored_where_nothing_else_is():
    torch.testing.assert_close(gradients(F.cross_entropy, by_token(), ignored=-100), expected(F.cross_entropy, -100))


@pytest.mark.parametrize(
    "loss, said",
    [
        (
            lambda a, b: F.cross_entropy(a, b, ignore_index=0) + F.cross_entropy(a, b),
            "ignore different targets: -100, 0",
        ),
        (lambda a, b: F.cross_entropy(a, b, torch.arange(6.0), ignore_index=0), "weighs classes"),
    ],
)
def test_losses_that_can_not_be_counted_by_one_number_are_refused(loss, said):
    with pytest.raises(StepError, match=said):
        gradients(loss, by_token())


def in_stages(beside):
    loss_fn = (lambda logits, x, labels: LOSSES["function"](logits, labels.flatten())) if beside else None
    plan = by_token(mesh={"pp": 2}, partition=["out"])
    model = zgraph.compile(Net(None if beside else LOSSES["function"]), plan, loss_fn=loss_fn)
    model.train_step(*batch(0))
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.gloo
@pytest.mark.parametrize("beside", [False, True])
def test_stages_count_alike(two, beside):
    names = [n for n, _ in Net(None).named_parameters()]
    plain = dict(zip(names, expected(LOSSES["function"]), strict=True))
    found = [x for rank in two.run(in_stages, beside) for x in rank.items()]
    assert {n for n, _ in found} == set(names)
    for name, grad in found:
        torch.testing.assert_close(grad, plain[name])

"""zgraph is a guest in the user's process: what it does not own is as it was."""

import logging

import pytest
import torch
from torch import nn

import zgraph


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_model():
    model = zgraph.compile(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), zgraph.Plan(backend="eager"))
    model(torch.randn(2, 3)).sum().backward()
    return model


def test_a_size_that_torch_has_made_dynamic_is_a_number_here():
    model = nn.Linear(3, 3)
    run = torch.compile(model, backend="eager")
    for rows in (2, 5, 7):  # (torch remembers by the code of a frame which sizes change)
        run(torch.randn(rows, 3))
    ours = zgraph.compile(model, zgraph.Plan(backend="eager"))
    for rows in (4, 6):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(ours(x), nn.functional.linear(x, ours.weight, ours.bias))


def test_levels_and_filters_of_loggers_are_as_they_were():
    names = ["", "zgraph", "torch", "torch._subclasses.fake_tensor", "torch._dynamo", "torch._inductor"]
    loggers = [logging.getLogger(name) for name in names]
    before = [(log.level, list(log.filters), list(log.handlers)) for log in loggers]
    compiled_model()
    assert [(log.level, list(log.filters), list(log.handlers)) for log in loggers] == before

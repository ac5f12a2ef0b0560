"""Architectures of transformers: captured as they are, with the loss and the gradients of plain PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from architectures import NAMES, REFUSED, build
from sweeps import sweep

import zgraph
from zgraph.errors import CaptureError

pytest.importorskip("transformers")


def compare(name: str, backend: str) -> tuple[float, float]:
    """The difference of losses, relative, and the largest one of gradients, in parts of all gradients' norm."""
    plain, batch = build(name)
    mine = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(backend=backend))
    losses = []
    for model in (plain, mine):
        torch.manual_seed(5)
        losses.append(model(**batch).loss)
        losses[-1].backward()
    pairs = [(a.grad, b.grad) for a, b in zip(plain.parameters(), mine.parameters(), strict=True)]
    assert all((a is None) == (b is None) for a, b in pairs)
    grads = [(a, b) for a, b in pairs if a is not None]
    total = torch.stack([a.norm() for a, _ in grads]).norm()
    worst = max(float((a - b).norm() / total) for a, b in grads)
    return float((losses[0] - losses[1]).abs() / losses[0].abs()), worst


# (Gradients that are sums of many are added in another order in a few: a handful of float32's roundings.)
@sweep("name", NAMES, quick=[NAMES.index("Mistral")])
def test_it_trains_as_in_plain_pytorch(name):
    loss, gradients = compare(name, "eager")
    assert loss == 0.0 and gradients <= 1e-6


@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_trains_compiled_by_inductor(name):
    loss, gradients = compare(name, "inductor")
    assert loss <= 2e-6 and gradients <= 2e-5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_its_shards_are_verified(name):
    model, batch = build(name)
    found = zgraph.verify(model, zgraph.Plan(zero=3, backend="eager"), 2, batch)
    assert found.ok, str(found)


@sweep("name", REFUSED, quick=1)
def test_what_can_not_be_captured_is_refused_with_its_line(name):
    model, batch = build(name)
    with pytest.raises(CaptureError) as found:
        zgraph.compile(model, zgraph.Plan(backend="eager"))(**batch)
    assert "transformers/models" in found.value.where

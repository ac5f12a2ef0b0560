"""The budget that a refusal names works, also where the disk is a little faster or slower the next time."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from sweeps import sweep
from torch import nn

import zgraph
from zgraph.build.memory_search import measured_rate
from zgraph.errors import PlanError
from zgraph.offload.files import FileStore


def test_a_measured_rate_is_rounded_so_that_a_little_makes_no_difference():
    assert measured_rate(1.1e9) == measured_rate(1.0e9) == 2.0**30


def attempt(plan):
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.Tanh())))
    zgraph.compile(model, plan, loss_fn=lambda output: output.square().mean())
    model.train_step(torch.randn(64, 64))


@sweep("kinds", [(), ("activations",), ("activations", "optimizer")], quick=(0,), ids=["none", "one", "both"])
def test_a_named_budget_works(kinds, tmp_path, monkeypatch):
    made, rates = FileStore.preflight, iter([1.0e9, 1.9e9])

    def preflight(self, needed):
        rate = next(rates)
        return dataclasses.replace(made(self, needed), read_rate=rate, write_rate=rate)

    monkeypatch.setattr(FileStore, "preflight", preflight)
    offload = {kind: f"auto:{tmp_path}" for kind in kinds}
    plan = zgraph.Plan(
        backend="eager", optimizer=zgraph.Adam(lr=1e-2), grad_clip=1.0, memory_budget=10000, offload=offload
    )
    with pytest.raises(PlanError, match="smallest that works") as caught:
        attempt(plan)
    named = int(re.search(r"smallest that works is (\d+) bytes", str(caught.value))[1])
    attempt(plan.model_copy(update={"memory_budget": named}))

"""A compiled model that nobody refers to any more does not weigh on the next one."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import zgraph


def _trained() -> nn.Module:
    """A model of 1.5 MiB that has taken a step by a plan's optimizer."""
    plan = zgraph.Plan(backend="eager", optimizer=zgraph.AdamW(lr=1e-3))
    model = zgraph.compile(nn.Sequential(nn.Linear(512, 768)), plan, loss_fn=lambda out: out.square().mean())
    model.train_step(torch.ones(2, 512))
    return model


def test_compiling_the_next_model_frees_one_that_was_dropped() -> None:
    gc.collect()
    gc.disable()
    try:
        model = _trained()
        held = [weakref.ref(t) for t in (*model.parameters(), *model.zgraph.runtime.updater.states.own().values())]
        del model
        assert any(h() is not None for h in held)  # (else there is nothing to free)
        kept = _trained()
        assert all(h() is None for h in held)
    finally:
        gc.enable()
    assert torch.isfinite(kept.train_step(torch.ones(2, 512))).all()


@pytest.mark.slow
def test_compiling_the_next_model_leaves_one_that_is_in_use() -> None:
    first, second = _trained(), _trained()
    assert all(torch.isfinite(m.train_step(torch.ones(2, 512))).all() for m in (first, second))

"""Architectures of transformers that differ in kind: compiled by Inductor, and divided over ranks; others are refused with their line."""

from __future__ import annotations

import pytest
from architectures import REFUSED, build, compare, for_two_ranks
from sweeps import sweep

import zgraph
from zgraph.errors import CaptureError

pytest.importorskip("transformers")

KINDS = ["Gemma2", "Qwen3Moe", "Mamba2", "T5", "DINOv2"]
"""Dense, a mixture of experts, state spaces, encoder and decoder, vision."""


@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_it_trains_compiled_by_inductor(name):
    loss, gradients = compare(name, "inductor")
    assert loss <= 2e-6 and gradients <= 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KINDS, "DeepseekV3", "Qwen2.5-VL"])
def test_its_shards_are_verified(name):
    model, batch, dynamic = for_two_ranks(name)
    found = zgraph.verify(model, zgraph.Plan(zero=3, backend="eager", dynamic=dynamic), 2, batch)
    assert found.ok, str(found)


@sweep("name", REFUSED, quick=1)
def test_what_can_not_be_captured_is_refused_with_its_line(name):
    model, batch = build(name)
    with pytest.raises(CaptureError) as found:
        zgraph.compile(model, zgraph.Plan(backend="eager"))(**batch)
    assert "transformers/" in found.value.where

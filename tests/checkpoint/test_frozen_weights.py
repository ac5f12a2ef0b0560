"""A checkpoint without frozen weights: it holds what is trained, and a run goes on from it with the frozen weights that its model has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import Ranks
from torch import nn

import zgraph
from zgraph.checkpoint.convert import convert
from zgraph.checkpoint.detect_format import open_checkpoint
from zgraph.errors import CheckpointError


def model(seed: int = 0, frozen: bool = True) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    torch.manual_seed(seed)
    nn.init.normal_(made[2].weight)
    made[0].requires_grad_(not frozen)
    return zgraph.compile(made, zgraph.Plan(backend="eager", zero=3, optimizer=zgraph.AdamW(lr=1e-2)))


def steps(made: nn.Module, count: int) -> list[float]:
    x = torch.arange(16.0).reshape(4, 4) / 8
    found = []
    for _ in range(count):
        loss = made(x).square().mean()
        loss.backward()
        made.step()
        found.append(float(loss))
    return found


def saved(folder: Path) -> list[float]:
    made = model()
    steps(made, 2)
    made.save_checkpoint(folder, "some", frozen=False)
    return steps(made, 2)


def resumed(folder: Path) -> list[float]:
    made = model(seed=1)  # (of what is trained other values, of what is frozen the same)
    made.load_checkpoint(folder)
    return steps(made, 2)


def test_what_is_frozen_is_not_written_and_stays_where_it_is(tmp_path):
    expected = saved(tmp_path)
    source = open_checkpoint(tmp_path, None)
    assert source.known.left_out == ["0.weight", "0.bias"]
    assert {n.split(".")[-2] for n in source.tensors if n.startswith("model.")} == {"2"}
    assert resumed(tmp_path) == expected


@pytest.mark.gloo
def test_ranks_leave_the_same_out(two: Ranks, tmp_path):
    expected = two.run(saved, tmp_path)
    assert two.run(resumed, tmp_path) == expected
    assert open_checkpoint(tmp_path, None).known.left_out == ["0.weight", "0.bias"]


def test_what_lacks_more_is_refused_and_what_is_left_out_is_named_by_convert(tmp_path):
    saved(tmp_path)
    with pytest.raises(CheckpointError, match="of another model"):
        zgraph.compile(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1)), zgraph.Plan(backend="eager")).load_checkpoint(
            tmp_path
        )
    with pytest.raises(CheckpointError, match="2 frozen weights are not in the checkpoint"):
        convert(open_checkpoint(tmp_path, None), tmp_path / "dcp", "some", "dcp")
    convert(open_checkpoint(tmp_path, None), tmp_path / "own", "some")
    assert open_checkpoint(tmp_path / "own", None).known.left_out == ["0.weight", "0.bias"]


def test_a_weight_that_was_trained_before_it_was_frozen_is_written(tmp_path):
    made = model(frozen=False)
    steps(made, 1)
    made.get_submodule("0").requires_grad_(False)
    made.save_checkpoint(tmp_path, "some", frozen=False)
    assert "model.0.weight" in open_checkpoint(tmp_path, None).tensors

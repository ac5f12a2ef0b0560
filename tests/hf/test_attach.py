"""`zgraph.hf.attach`: an unmodified Trainer trains by a plan, with the numbers of plain training and of DistributedDataParallel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import Ranks
from safetensors.torch import load_file
from sweeps import sweep
from trainers import ONE, trained

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

# Losses are means of float32 numbers that ranks add in another order than DDP's buckets do.
TOLERANCE = {"rel": 1e-5, "abs": 1e-6}


def equal(mine: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    assert len(mine) == len(theirs)
    for at, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        assert one == pytest.approx(other, **TOLERANCE), at


def weights(folder: str) -> dict[str, torch.Tensor]:
    return load_file(os.path.join(folder, "model.safetensors"))


def run(kind: str, folder: str, plan: dict[str, Any] | None, resume: str | None, options: dict[str, Any]) -> Any:
    return trained(kind, folder, plan, resume, **options)[0]


MODELS = [
    ("gpt2", {"zero": 3}, {"gradient_accumulation_steps": 2}),
    ("llama", {"zero": 2}, {"gradient_checkpointing": True}),
    ("t5", {"zero": 1}, {"weight_decay": 0.1}),
    ("vit", {"zero": 0}, {"max_grad_norm": 0.05}),
    ("gpt2", {"zero": 1}, {"bf16": True}),
    ("llama", {"zero": 3}, {"average_tokens_across_devices": False, "optim": "sgd", "label_smoothing_factor": 0.1}),
    ("bert", {"zero": 3}, {"load_best_model_at_end": True, "weight_decay": 0.1}),
    ("gpt2", {"zero": 2}, {"train_sampling_strategy": "group_by_length"}),
    ("bert", {"zero": 3}, {"load_best_model_at_end": True, "lengths": ONE}),
]


@pytest.mark.gloo
@sweep("kind, plan, options", MODELS, quick=1)
def test_a_run_on_two_ranks_is_that_of_ddp(two: Ranks, tmp_path, kind, plan, options):
    options = {"steps": 6, **options}
    plain = two.run(run, kind, str(tmp_path / "plain"), None, None, options)
    mine = two.run(run, kind, str(tmp_path / "mine"), plan, None, options)
    for one, other in zip(mine, plain, strict=True):
        equal(one, other)
    ours, theirs = (weights(str(tmp_path / name / "checkpoint-6")) for name in ("mine", "plain"))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=2e-5, msg=name)  # (Adam divides by its size)


@pytest.fixture
def three() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


@pytest.mark.gloo
@pytest.mark.slow
def test_a_run_goes_on_on_other_ranks(two: Ranks, three: Ranks, tmp_path):
    """From two ranks to one to three, with the same rows in all; as plain training without a break."""
    plan, last, folder = {"zero": 3}, {"zero": 2}, str(tmp_path / "mine")
    usual = {"lr_scheduler_type": "linear", "eval_strategy": "no", "lengths": ONE, "rows": 30}

    def rows_on(world: int) -> dict[str, Any]:
        return {**usual, "per_device_train_batch_size": 6 // world}

    expected = run("gpt2", str(tmp_path / "plain"), None, None, {"steps": 12, **rows_on(1)})
    found = [
        two.run(run, "gpt2", folder, plan, None, {"steps": 12, "stop": 3, **rows_on(2)})[1],
        run("gpt2", folder, plan, f"{folder}/checkpoint-3", {"steps": 12, "stop": 6, **rows_on(1)}),
        three.run(run, "gpt2", folder, last, f"{folder}/checkpoint-6", {"steps": 12, **rows_on(3)})[2],
    ]
    for entries, count in zip(found, (3, 6, 12), strict=True):
        assert len(entries) == count
        for one, other in zip(entries, expected, strict=False):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-5)

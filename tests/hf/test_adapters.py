"""A Trainer with a model of PEFT's, attached: adapters train and are saved as over DistributedDataParallel; the base stays as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from safetensors.torch import load_file
from trainers import ONE, trained

from zgraph.checkpoint.detect_format import open_checkpoint

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")


TRAINED = ("lora_", "ia3_", "modules_to_save", "prompt_encoder")


def run(folder: str, plan: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    return trained("llama", folder, plan, **options)[0]


@pytest.mark.gloo
@pytest.mark.parametrize(
    "adapter, zero, options",
    [
        ("lora, and the head", 2, {"gradient_accumulation_steps": 2}),
        ("ia3", 1, {}),
        ("lora", 0, {"bf16": True}),
        ("lora", 3, {"load_best_model_at_end": True, "save_only_model": True}),
        ("prompt", 0, {}),
        ("prompt", 1, {"gradient_accumulation_steps": 2}),
        ("prompt", 2, {}),
        ("prompt", 3, {"load_best_model_at_end": True, "save_only_model": True}),
        ("p-tuning", 3, {}),
        ("prefix", 3, {}),
    ],
)
@pytest.mark.slow
def test_adapters_train_as_over_ddp(two: Ranks, tmp_path: Path, adapter: str, zero: int, options: dict[str, Any]):
    options = {"adapter": adapter, "lengths": ONE, **options}
    plain = two.run(run, str(tmp_path / "plain"), None, options)
    mine = two.run(run, str(tmp_path / "mine"), {"zero": zero}, options)
    for one, other in zip(mine, plain, strict=True):
        for entry, expected in zip(one, other, strict=True):
            assert entry == pytest.approx(expected, rel=5e-3 if "bf16" in options else 1e-5, abs=1e-6)
    ours, theirs = (
        load_file(tmp_path / run / "checkpoint-6" / "adapter_model.safetensors") for run in ("mine", "plain")
    )
    assert ours.keys() == theirs.keys()
    if "save_only_model" not in options:
        held = open_checkpoint(tmp_path / "mine" / "checkpoint-6", "zgraph").tensors
        weights = [n for n in held if n.startswith("model.")]
        assert weights and all(any(part in n for part in TRAINED) for n in weights)
    for name, value in theirs.items():
        # Adam divides by the gradient's size, so that of one that is nearly zero makes a whole step of its rounding.
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=5e-3 if "bf16" in options else 2e-5, msg=name)

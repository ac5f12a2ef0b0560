"""TRL's trainers, attached: losses, gradient norms, metrics and completions are those over DistributedDataParallel."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import nn

import zgraph
from zgraph.errors import ModelError

pytest.importorskip("trl")
pytest.importorskip("datasets")

import trl
from safetensors.torch import load_file
from trainers import as_launched
from trl.kernels import ChunkedLogProbFunction
from trl_trainers import trained, trainer_of

from zgraph.torch_compat.library_functions import log_probabilities


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(
    "kind, plan, adapter, options",
    [
        ("sft", {"zero": 3}, None, {}),
        ("grpo", {"zero": 3}, None, {"beta": 0.1}),
        ("dpo", {"zero": 3}, None, {}),
        ("sft, completions", {"zero": 2}, None, {"gradient_accumulation_steps": 2}),
        ("sft", {"zero": 3}, "lora", {}),
        ("reward", {"zero": 2}, None, {}),
        ("sft", {"zero": 3}, None, {"packing": True, "max_length": 16}),
        ("sft", {"zero": 3}, None, {"padding_free": True, "max_length": None}),
        ("dpo", {"zero": 2}, "lora", {}),
        ("grpo", {"zero": 2}, "lora", {}),
        ("dpo", {"zero": 3}, None, {"sync_ref_model": True, "ref_model_sync_steps": 2}),
        ("sft", {"zero": 3}, "lora", {"gradient_checkpointing": True}),
        ("sft", {"zero": 3}, None, {"packing": True, "max_length": 16, "packing_strategy": "bfd_split"}),
        ("kto", {"zero": 2}, None, {}),
        ("orpo", {"zero": 2}, "lora", {}),
        ("rloo", {"zero": 3}, None, {}),
        ("sft", {"zero": 3}, None, {"packing": True, "max_length": 16, "packing_strategy": "wrapped"}),
        ("sft", {"zero": 3}, "lora", {"loss_type": "dft", "gradient_checkpointing": True}),
        ("dpo", {"zero": 3}, None, {"loss_type": ["ipo", "sigmoid_norm"], "loss_weights": [0.5, 1.0]}),
        ("grpo", {"zero": 3}, "lora", {"beta": 0.1, "gradient_checkpointing": True}),
        ("distillation", {"zero": 3}, "lora", {}),
        ("sdft", {"zero": 3}, None, {}),
    ],
)
def test_a_run_of_trl_is_that_of_ddp(
    two: Ranks, tmp_path: Path, kind: str, plan: dict[str, Any], adapter: str | None, options: dict[str, Any]
):
    plain = two.run(trained, kind, str(tmp_path / "plain"), None, adapter, options)
    mine = two.run(trained, kind, str(tmp_path / "mine"), plan, adapter, options)
    for (one, programs), (other, _) in zip(mine, plain, strict=True):
        assert programs
        for entry, expected in zip(one, other, strict=True):
            assert entry == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("softcap, scale, temperature", [(None, 1.0, 1.0), (20.0, 0.5, 0.7)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_head_has_the_numbers_of_trls(softcap, scale, temperature, bias):
    outputs = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    torch.manual_seed(0)
    tensors = [torch.randn(7, 8), torch.randn(33, 8), torch.randn(33) if bias else None]
    targets, found = torch.randint(0, 33, (7,)), []
    targets[0] = (tensors[0] @ tensors[1].T)[0].argmax()
    for function in (ChunkedLogProbFunction.apply, log_probabilities):
        given = [t.clone().requires_grad_() if t is not None else None for t in tensors]
        made = function(*given, targets, temperature, 8, softcap, scale, outputs)
        (made[0].sum() * 2 + made[1].square().sum()).backward()
        found.append([*made, *(t.grad for t in given if t is not None)])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not any(value.requires_grad for value in found[1][2:5])


def synced(folder: str, plan: dict[str, Any] | None) -> tuple[torch.Tensor, bool]:
    """A reference model's first weight after it was moved towards the trained one, and whether that moved it."""
    with as_launched():
        trainer = trainer_of("dpo", folder, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.25)
        if plan is not None:
            zgraph.hf.attach(trainer, zgraph.Plan(backend="eager", **plan))
        weight, found = next(trainer.ref_model.parameters()), []
        for step in (1, 2):
            trainer.state.global_step = step
            before = weight.detach().clone()
            with zgraph.full_weights(trainer.model, write=True) if plan is not None else torch.no_grad():
                next(trainer.model.parameters()).data.add_(1.0)
            trainer.callback_handler.on_step_end(trainer.args, trainer.state, trainer.control)
            found.append(not torch.equal(before, weight))
        assert found == [False, True]
        return weight.detach().clone(), found[1]


@pytest.mark.gloo
@pytest.mark.slow
def test_a_reference_model_follows_the_trained_one(two: Ranks, tmp_path: Path):
    expected, _ = synced(str(tmp_path / "plain"), None)
    for weight, moved in two.run(synced, str(tmp_path / "mine"), {"zero": 3}):
        assert moved and torch.equal(weight, expected)


def averaged(folder: str, plan: dict[str, Any] | None) -> None:
    """Train with TRL's callback that averages weights, and writes them."""
    with as_launched():
        trainer = trainer_of("sft", folder, max_steps=4)
        if plan is not None:
            zgraph.hf.attach(trainer, zgraph.Plan(backend="eager", **plan))
        trainer.add_callback(trl.BEMACallback(update_freq=2, update_after=1))
        trainer.train()


@pytest.mark.gloo
@pytest.mark.slow
def test_averages_are_of_whole_weights(two: Ranks, tmp_path: Path):
    two.run(averaged, str(tmp_path / "plain"), None)
    two.run(averaged, str(tmp_path / "mine"), {"zero": 3})
    plain, mine = (load_file(tmp_path / name / "bema" / "model.safetensors") for name in ("plain", "mine"))
    torch.testing.assert_close(mine, plain)


def test_an_adapter_that_trl_adds_when_training_begins_is_refused(tmp_path):
    trainer = trainer_of("sdft", str(tmp_path / "run"), "lora")
    with pytest.raises(ModelError, match="adds an adapter for the teacher"):
        zgraph.hf.attach(trainer)


class Head(nn.Module):
    """TRL's head with all that it may be asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 33)

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        outputs = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
        rows = self.body(hidden)[:, :-1].reshape(-1, 4)
        return log_probabilities(
            rows, self.head.weight, self.head.bias, targets.reshape(-1), 0.7, 8, 20.0, 0.5, outputs
        )


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_head_in_chunks_has_the_numbers_of_whole_logits(backend):
    torch.manual_seed(0)
    inputs = torch.randn(2, 5, 4).double(), torch.randint(0, 33, (2, 4))
    plan = zgraph.Plan(backend=backend, zero=3, tiles={"loss": 3})
    found = zgraph.verify(
        Head().double(), plan, 2, inputs, loss_fn=lambda outputs: (outputs[0] - 0.1 * outputs[1].square()).mean()
    )
    assert found.ok, str(found)
    assert any(d.what == "gradient" for d in found.differences)


class TheirHead(Head):
    """Calls TRL's own function."""

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        outputs = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
        rows = self.body(hidden)[:, :-1].reshape(-1, 4)
        found: tuple[torch.Tensor | None, ...] = ChunkedLogProbFunction.apply(
            rows, self.head.weight, self.head.bias, targets.reshape(-1), 0.7, 8, 20.0, 0.5, outputs
        )
        return found


def test_trls_head_is_captured_as_one_of_whole_logits():
    torch.manual_seed(0)
    plain = TheirHead()
    mine = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(backend="eager"))
    inputs = torch.randn(2, 5, 4), torch.randint(0, 33, (2, 4))
    kept = []
    for model in (plain, mine):
        found = model(*inputs)
        (found[0].sum() - found[1].square().sum()).backward()
        kept.append(found)
    torch.testing.assert_close(kept[1], kept[0])
    for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)

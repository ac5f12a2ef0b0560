"""AdaLoRA on two ranks: its ranks are measured and masked by whole adapters and whole gradients, as in plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from sweeps import sweep
from torch import nn
from trainers import ONE, as_launched, history, model_of, trainer_of

import zgraph
from zgraph.errors import StepError

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

IDS, STEPS = torch.arange(3, 39).reshape(4, 9), 6


def adapted(base: Any = None) -> Any:
    model = model_of("llama") if base is None else base
    torch.manual_seed(1)
    config = peft.AdaLoraConfig(
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj"],
        **{"total_step": STEPS, "tinit": 1, "tfinal": 2, "deltaT": 1, "init_r": 6, "target_r": 2},
    )
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_E" in name:
                param.normal_()
    return model


def trained(plan: dict[str, Any] | None, folder: str, before: bool = True) -> tuple[list[float], Any, dict[str, Any]]:
    """Losses, which ranks are left, and what is saved; `before`: ranks are measured before the update."""
    model, ids = adapted(), IDS
    own = plan is None or "optimizer" not in plan
    if plan is not None:
        zgraph.compile(model, zgraph.Plan(backend="eager", **plan))
        ids = IDS.chunk(dist.get_world_size())[dist.get_rank()]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)
    found = []
    for step in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if before:
            model.base_model.update_and_allocate(step)
        (optimizer if own else model).step()
        if not before:
            model.base_model.update_and_allocate(step)
        (optimizer if own else model).zero_grad()
        found.append(float(loss.detach()))
    left = model.peft_config["default"].rank_pattern
    model.save_pretrained(folder)
    return found, left, peft.utils.load_peft_weights(folder, device="cpu")


WHO = [("the plan's optimizer", True), ("one's own", True), ("one's own", False)]


@pytest.mark.gloo
@sweep("zero,who,before", [(zero, *case) for zero in (3, 0) for case in WHO], quick=[2])
def test_ranks_are_measured_and_masked_as_in_plain_pytorch(two: Ranks, tmp_path: Path, zero, who, before):
    plan = {"zero": zero} if who == "one's own" else {"zero": zero, "optimizer": zgraph.AdamW(lr=1e-2)}
    losses, left, saved = trained(None, str(tmp_path / "plain"), before)
    assert sum(map(sum, left.values())) == 4  # (of 12 ranks)
    mine = two.run(trained, plan, str(tmp_path / "mine"), before)
    means = [sum(each) / 2 for each in zip(*(found for found, _, _ in mine), strict=True)]
    assert means == pytest.approx(losses, rel=1e-5)
    for _, masks, state in mine:
        assert masks == left
        torch.testing.assert_close(state, saved, rtol=1e-4, atol=1e-6)


def test_gradients_that_the_update_took_are_missed():
    model = zgraph.compile(adapted(), zgraph.Plan(backend="eager", optimizer=zgraph.AdamW(lr=1e-2)))
    model(input_ids=IDS, labels=IDS).loss.backward()
    model.step()
    with pytest.raises(StepError, match="finds no gradients") as caught:
        model.base_model.update_and_allocate(0)
    assert "between loss.backward() and step()" in caught.value.hint


class Outer(nn.Module):
    """Holds a model with adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = adapted()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(input_ids=ids, labels=ids).loss
        return loss


def of_a_part() -> Any:
    model = zgraph.compile(Outer(), zgraph.Plan(backend="eager", zero=3))
    for step in range(STEPS):
        model(IDS).backward()
        model.inner.base_model.update_and_allocate(step)
        model.zero_grad()
    return model.inner.peft_config["default"].rank_pattern


@pytest.mark.gloo
@pytest.mark.slow
def test_an_adapted_model_may_be_a_part_of_the_compiled_one(two: Ranks):
    plain = Outer()
    for step in range(STEPS):
        plain(IDS).backward()
        plain.inner.base_model.update_and_allocate(step)
        plain.zero_grad()
    assert two.run(of_a_part) == [plain.inner.peft_config["default"].rank_pattern] * 2


class Allocates(transformers.TrainerCallback):
    """Measures and masks ranks in each step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        model.base_model.update_and_allocate(state.global_step)


def by_a_trainer(plan: zgraph.Plan | None, folder: str) -> tuple[list[dict[str, float]], Any]:
    with as_launched():
        options = {"eval_strategy": "no", "save_strategy": "no", "steps": STEPS}
        trainer = trainer_of("llama", folder, adapter="lora", lengths=ONE, **options)
        trainer = transformers.Trainer(
            adapted(), trainer.args, train_dataset=trainer.train_dataset, data_collator=trainer.data_collator
        )
        trainer.add_callback(Allocates())
        if plan is not None:
            zgraph.hf.attach(trainer, plan)
        trainer.train()
        return history(trainer), trainer.model.peft_config["default"].rank_pattern


@pytest.mark.gloo
@pytest.mark.slow
def test_a_callback_of_a_trainer_does_it(two: Ranks, tmp_path: Path):
    plain = two.run(by_a_trainer, None, str(tmp_path / "plain"))[0]
    logs, left = two.run(by_a_trainer, zgraph.Plan(backend="eager", zero=3), str(tmp_path / "mine"))[0]
    assert left == plain[1]
    for one, other in zip(logs, plain[0], strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)

"""Thirty steps on two ranks through each front door are DistributedDataParallel's: losses, gradient norms, evaluations, losses after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import nn
from trainers import ONE, VARYING, Rows, as_launched, collator, history, model_of, tokenizer, trained

import zgraph

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = [pytest.mark.slow, pytest.mark.gloo]

STEPS, HALF = 30, 15
# Losses are means of float32 numbers that ranks add in another order than DDP's buckets do. The rate is one with which
# thirty updates don't make more of that: with 1e-2 what differs grows tenfold, between two runs of plain PyTorch on one rank and on two as well.
TOLERANCE = {"rel": 1e-5, "abs": 1e-5}
RATE = 1e-3


def equal(mine: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    assert len(mine) == len(theirs) >= STEPS
    for at, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        assert one == pytest.approx(other, **TOLERANCE), at


def difference(mine: list[dict[str, float]], theirs: list[dict[str, float]]) -> float:
    return max(abs(one[key] - other[key]) for one, other in zip(mine, theirs, strict=True) for key in other)


def steps(kind: str, folder: str, plan: dict[str, Any] | None, resume: str | None, options: dict[str, Any]) -> Any:
    given = {"steps": STEPS, "eval_steps": HALF, "save_steps": HALF, "learning_rate": RATE, **options}
    return trained(kind, folder, plan, resume, **given)[0]


def compare(two: Ranks, folder: Path, kind: str, zero: int, options: dict[str, Any]) -> None:
    plain = two.run(steps, kind, str(folder / "plain"), None, None, options)
    mine = two.run(steps, kind, str(folder / "mine"), {"zero": zero}, None, options)
    half = str(folder / "mine" / f"checkpoint-{HALF}")
    resumed = two.run(steps, kind, str(folder / "again"), {"zero": zero}, half, options)
    for one, again, other in zip(mine, resumed, plain, strict=True):
        equal(one, other)
        equal(again, other)
        assert {"loss", "grad_norm"} <= one[0].keys() and sum("eval_loss" in entry for entry in one) == STEPS // HALF
    print(
        f"largest difference {difference(mine[0], plain[0]):.1e}, after a resume {difference(resumed[0], plain[0]):.1e}"
    )


@pytest.mark.parametrize("kind, zero", [("gpt2", 3), ("llama", 2), ("bert", 3), ("t5", 1), ("vit", 0)])
def test_a_trainer(two: Ranks, tmp_path: Path, kind: str, zero: int):
    compare(two, tmp_path, kind, zero, {"lengths": VARYING})


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_trainer_with_lora(two: Ranks, tmp_path: Path, zero: int):
    pytest.importorskip("peft")
    compare(two, tmp_path, "llama", zero, {"adapter": "lora", "lengths": ONE if zero in (0, 1) else VARYING})


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def rows(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(6, generator=generator) for _ in range(count)]


def loop(folder: str, plan: zgraph.Plan | None, resume: bool) -> list[dict[str, float]]:
    """What a loop of one's own with accelerate finds at each step: the loss over all ranks, the norm, and at the end an evaluation."""
    from accelerate import Accelerator

    with as_launched():
        accelerator = Accelerator(cpu=True)
        made = model() if plan is None else zgraph.compile(model(), plan)
        optimizer = torch.optim.AdamW(made.parameters(), lr=RATE, foreach=False)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
        loader = torch.utils.data.DataLoader(rows(2 * 2 * STEPS), batch_size=2)
        held_out = torch.utils.data.DataLoader(rows(9), batch_size=2)
        made, optimizer, loader, held_out, schedule = accelerator.prepare(made, optimizer, loader, held_out, schedule)
        found = []
        if resume:
            accelerator.load_state(folder)
            loader = accelerator.skip_first_batches(loader, HALF)
        for at, x in enumerate(loader, HALF if resume else 0):
            loss = made(x).square().mean()
            accelerator.backward(loss)
            norm = float(accelerator.clip_grad_norm_(made.parameters(), 0.5))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            found.append({"loss": float(accelerator.gather(loss.detach()).mean()), "grad_norm": norm})
            if at + 1 == HALF and not resume:
                accelerator.save_state(folder)
        made.eval()
        with torch.no_grad():
            values = torch.cat([accelerator.gather_for_metrics(made(x).square()) for x in held_out])
        assert len(values) == 9
        return [*found, {"eval_loss": float(values.mean())}]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_loop_with_accelerate(two: Ranks, tmp_path: Path, zero: int):
    plan = zgraph.Plan(backend="eager", zero=zero)
    plain = two.run(loop, str(tmp_path / "plain"), None, False)
    mine = two.run(loop, str(tmp_path / "mine"), plan, False)
    resumed = two.run(loop, str(tmp_path / "mine"), plan, True)
    for one, again, other in zip(mine, resumed, plain, strict=True):
        equal(one, other)
        equal([*one[:HALF], *again], other)


@pytest.mark.parametrize(
    "kind, zero, adapter",
    [("sft", 3, None), ("dpo", 3, None), ("grpo", 3, None), ("sft, completions", 2, None), ("dpo", 2, "lora"), ("grpo", 2, "lora")],
)  # fmt: skip
def test_a_trainer_of_trl(two: Ranks, tmp_path: Path, kind: str, zero: int, adapter: str | None):
    pytest.importorskip("trl")
    from trl_trainers import trained as trained_by_trl

    options = {"max_steps": STEPS, "learning_rate": RATE, "save_strategy": "steps", "save_steps": HALF}
    found = []
    for name, plan in (("plain", None), ("mine", {"zero": zero})):
        whole = two.run(trained_by_trl, kind, str(tmp_path / name), plan, adapter, options)
        half = str(tmp_path / name / f"checkpoint-{HALF}")
        again = two.run(trained_by_trl, kind, str(tmp_path / f"{name} again"), plan, adapter, options, half)
        assert all(programs for _, programs in whole) == (plan is not None)
        found.append([[*logs, *resumed[HALF:]] for (logs, _), (resumed, _) in zip(whole, again, strict=True)])
    # (TRL itself counts tokens anew after a resume, and GRPO draws other answers then: so both runs are resumed.)
    for other, one in zip(*found, strict=True):
        equal(one, other)
    print(f"largest difference {difference(found[1][0], found[0][0]):.1e}")


def generating(folder: str, plan: dict[str, Any] | None) -> Any:
    """What a Seq2SeqTrainer that evaluates by generation logs, what it predicts, and how many programs there are."""
    import transformers

    def metrics(found: Any) -> dict[str, float]:
        return {"rows": len(found.predictions), "sum": float(found.predictions.clip(min=0).sum())}

    arguments = transformers.Seq2SeqTrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=2, per_device_eval_batch_size=2, eval_strategy="steps",
        eval_steps=HALF, save_strategy="no", logging_steps=1, learning_rate=RATE, report_to=[], use_cpu=True,
        disable_tqdm=True, predict_with_generate=True,
    )  # fmt: skip
    rows = Rows("t5", 28, VARYING), Rows("t5", 9, VARYING)
    with as_launched():
        trainer = transformers.Seq2SeqTrainer(
            model_of("t5"), arguments, collator("t5"), *rows, processing_class=tokenizer(), compute_metrics=metrics
        )
        if plan is not None:
            zgraph.hf.attach(trainer, zgraph.Plan(backend="eager", **plan))
        trainer.train()
        predictions = torch.as_tensor(trainer.predict(rows[1]).predictions)
        return history(trainer), predictions, len(trainer.model.zgraph.programs) if plan is not None else 0


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_seq2seq_trainer_that_generates(two: Ranks, tmp_path: Path, zero: int):
    plain = two.run(generating, str(tmp_path / "plain"), None)
    mine = two.run(generating, str(tmp_path / "mine"), {"zero": zero})
    for (one, tokens, programs), (other, expected, _) in zip(mine, plain, strict=True):
        equal(one, other)
        assert torch.equal(tokens, expected)
        # Training and evaluation: the first sizes, all sizes, a single row; labels of other lengths. None for generated tokens.
        assert programs <= 6

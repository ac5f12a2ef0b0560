"""transformers' Trainer, which knows nothing of zgraph, trains a compiled model: batches as long as its collator makes them."""

from __future__ import annotations

import logging
import random
import warnings
from pathlib import Path

import pytest
import torch

import zgraph

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


class Rows(torch.utils.data.Dataset):
    """Texts of 5 to 40 words."""

    def __init__(self, count: int) -> None:
        draw = random.Random(count)
        self.rows = [[draw.randrange(3, 97) for _ in range(draw.randint(5, 40))] for _ in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> dict[str, list[int]]:
        return {"input_ids": self.rows[at], "attention_mask": [1] * len(self.rows[at]), "labels": list(self.rows[at])}


def collator():
    from tokenizers import Tokenizer, models

    words = models.WordLevel({f"w{i}": i for i in range(97)}, "w1")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="w0", unk_token="w1")
    return transformers.DataCollatorForSeq2Seq(tokenizer)


def trainer(model: torch.nn.Module, folder: Path):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        max_steps=8,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="steps",
        save_steps=4,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    return transformers.Trainer(
        model, arguments, train_dataset=Rows(26), eval_dataset=Rows(10), data_collator=collator()
    )


def model(compiled: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=97, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2
    )
    made = transformers.GPT2LMHeadModel(config)
    return zgraph.compile(made, zgraph.Plan(backend="eager")) if compiled else made


@pytest.mark.slow
def test_the_trainer_trains_saves_and_resumes_as_with_the_plain_model(tmp_path, caplog):
    warnings.filterwarnings("ignore")
    caplog.set_level(logging.WARNING, "zgraph")
    losses, weights = [], []
    for compiled in (False, True):
        trained = model(compiled)
        folder = tmp_path / str(compiled)
        trainer(trained, folder).train()
        assert set(trained.zgraph.programs) == {"train0", "train1", "eval2"} if compiled else True
        again = trainer(model(compiled), folder)
        again.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
        again.save_model(str(folder / "model"))
        losses.append([{k: v for k, v in x.items() if "loss" in k} for x in again.state.log_history[:-1]])
        weights.append(transformers.GPT2LMHeadModel.from_pretrained(folder / "model").state_dict())
    assert losses[0] == losses[1]
    assert all(torch.equal(weights[0][n], weights[1][n]) for n in weights[0])
    assert "programs were compiled" not in caplog.text

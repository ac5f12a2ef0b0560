"""transformers' Trainer on small models, as a user would call it: plain (over DDP on several ranks) or attached to a plan."""

from __future__ import annotations

import contextlib
import os
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import zgraph

WORDS, EAGER = 97, {"backend": "eager"}


class Rows(torch.utils.data.Dataset):
    """Texts of so many words, with a class each; or pictures."""

    def __init__(self, kind: str, count: int, lengths: tuple[int, int]) -> None:
        draw = random.Random(count)
        torch.manual_seed(count)
        self.rows: list[dict[str, Any]] = []
        for _ in range(count):
            text = [draw.randrange(3, WORDS) for _ in range(draw.randint(*lengths))]
            if kind == "vit":
                self.rows.append({"pixel_values": torch.randn(3, 16, 16), "labels": draw.randrange(3)})
            elif kind == "bert":
                self.rows.append({"input_ids": text, "labels": draw.randrange(3)})
            else:
                answer = text[: draw.randint(3, 9)] if kind == "t5" else list(text)
                self.rows.append({"input_ids": text, "attention_mask": [1] * len(text), "labels": answer})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> dict[str, Any]:
        return dict(self.rows[at])


def tokenizer() -> Any:
    import transformers
    from tokenizers import Tokenizer, models

    words = models.WordLevel({f"w{i}": i for i in range(WORDS)}, "w1")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="w0", unk_token="w1")


def collator(kind: str) -> Any:
    import transformers

    if kind == "vit":
        return transformers.DefaultDataCollator()
    if kind == "bert":
        return transformers.DataCollatorWithPadding(tokenizer())
    return transformers.DataCollatorForSeq2Seq(tokenizer())


def model_of(kind: str) -> Any:
    import transformers as t

    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if kind == "gpt2":
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = t.GPT2Config(vocab_size=WORDS, n_positions=64, n_embd=16, n_layer=1, n_head=2, **ends, **none)
        return t.GPT2LMHeadModel(config)
    if kind == "llama":
        return t.LlamaForCausalLM(
            t.LlamaConfig(vocab_size=WORDS, max_position_embeddings=64, num_key_value_heads=1, **small, **ends)
        )
    if kind == "bert":
        return t.BertForSequenceClassification(
            t.BertConfig(vocab_size=WORDS, max_position_embeddings=64, num_labels=3, **small, **still)
        )
    if kind == "t5":
        config = t.T5Config(
            vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
            pad_token_id=0, eos_token_id=2, decoder_start_token_id=0,
        )  # fmt: skip
        return t.T5ForConditionalGeneration(config)
    assert kind == "vit"
    return t.ViTForImageClassification(t.ViTConfig(image_size=16, patch_size=8, num_labels=3, **small, **still))


@contextlib.contextmanager
def as_launched() -> Iterator[None]:
    """The variables that torchrun sets, by which accelerate finds that there are several ranks; and no state of accelerate's from before."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    before = dict(os.environ)
    if dist.is_initialized():
        rank, world = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    states = (AcceleratorState, GradientState, PartialState)
    for state in states:
        state._reset_state()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        for state in states:
            state._reset_state()


def adapted(kind: str, adapter: str) -> Any:
    """The model with an adapter of PEFT's."""
    import peft

    model, task = model_of(kind), {"task_type": "CAUSAL_LM"}
    torch.manual_seed(1)
    if adapter == "lora":
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian", **task)
    elif adapter == "lora, and the head":
        config = peft.LoraConfig(r=4, target_modules=["down_proj"], modules_to_save=["lm_head"], **task)
    elif adapter == "ia3":
        config = peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **task)
    elif adapter == "prompt":
        config = peft.PromptTuningConfig(num_virtual_tokens=3, **task)
    elif adapter == "p-tuning":
        config = peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, encoder_dropout=0.0, **task)
    else:
        assert adapter == "prefix"
        config = peft.PrefixTuningConfig(num_virtual_tokens=3, **task)
    return peft.get_peft_model(model, config)


VARYING, ONE = (5, 40), (9, 9)
"""Lengths of rows: those of ordinary texts; and one, where a test is not about lengths (a program for all takes five times as long to make)."""


def trainer_of(
    kind: str,
    folder: str,
    steps: int = 6,
    cls: Any = None,
    adapter: str | None = None,
    lengths: tuple[int, int] = VARYING,
    stop: int | None = None,
    rows: int = 28,
    **options: Any,
) -> Any:
    """A Trainer for so many steps. `stop`: the step after which its run breaks off."""
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir=folder,
        **{
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "max_steps": steps,
            "eval_strategy": "steps",
            "eval_steps": 3,
            "save_strategy": "steps",
            "save_steps": 3,
            "logging_steps": 1,
            "learning_rate": 1e-2,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            **options,
        },
    )
    return (cls or transformers.Trainer)(
        model_of(kind) if adapter is None else adapted(kind, adapter),
        arguments,
        train_dataset=Rows(kind, rows, lengths),
        eval_dataset=Rows(kind, 9, lengths),
        data_collator=collator(kind),
        callbacks=[_stops_after(stop)] if stop is not None else None,
    )


def _stops_after(steps: int) -> Any:
    import transformers

    class Stops(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            control.should_training_stop = state.global_step >= steps

    return Stops()


def history(trainer: Any) -> list[dict[str, float]]:
    """What was logged, but for times."""
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch")
    kept += ("eval_rows", "eval_sum", "eval_batches", "num_input_tokens_seen")
    return [{k: float(v) for k, v in entry.items() if k in kept} for entry in trainer.state.log_history[:-1]]


def trained(
    kind: str,
    folder: str,
    plan: dict[str, Any] | None,
    resume: str | None = None,
    also: Callable[[Any], Any] | None = None,
    **options: Any,
) -> tuple[list[dict[str, float]], Any]:
    """What a run logged (plain without a plan), and what `also` finds of the trainer after it."""
    warnings.filterwarnings("ignore")
    with as_launched():
        trainer = trainer_of(kind, folder, **options)
        if plan is not None:
            zgraph.hf.attach(trainer, zgraph.Plan(**{**EAGER, **plan}))
        trainer.train(resume_from_checkpoint=resume)
        return history(trainer), also(trainer) if also is not None else None

"""What these examples share: sentences to learn, a tokenizer of their words, a Llama of two narrow layers. Nothing is downloaded."""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WORDS = ("<pad>", "<unknown>", "<end>", *NUMBERS, "plus", "is")


def sentences() -> list[str]:
    """Sums of two numbers: "two plus three is five". So many that batches of eight leave none over, on any number of ranks."""
    pairs = [(a, b) for a in range(10) for b in range(10 - a)][:48]
    return [f"{NUMBERS[a]} plus {NUMBERS[b]} is {NUMBERS[a + b]}" for a, b in pairs]


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, "<unknown>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unknown>", eos_token="<end>"
    )


def llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            use_cache=False,
            pad_token_id=0,
            eos_token_id=2,
        )
    )


def rows() -> list[dict[str, list[int]]]:
    """The sentences as a causal language model takes them."""
    words = tokenizer()
    ids = [words(text)["input_ids"] for text in sentences()]
    return [{"input_ids": i, "attention_mask": [1] * len(i), "labels": list(i)} for i in ids]


def options(description: str | None, steps: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--folder", default=tempfile.gettempdir() + "/zgraph-huggingface", help="where the run writes")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "eager"])
    return parser.parse_args()


def arguments(given: argparse.Namespace, batch: int = 8) -> dict[str, Any]:
    """What the arguments of each kind of Trainer have in common; `batch` rows a step, on however many ranks."""
    from accelerate import PartialState

    return {
        "output_dir": given.folder,
        "max_steps": given.steps,
        "per_device_train_batch_size": batch // PartialState().num_processes,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": given.steps // 4,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
        "bf16": False,
        "gradient_checkpointing": False,
    }


def told(trainer: Any, name: str = "loss") -> None:
    """Print how a number of the logs changed."""
    found = [entry[name] for entry in trainer.state.log_history if name in entry]
    if trainer.is_world_process_zero():
        programs = len(trainer.model.zgraph.programs)
        print(
            f"{name} {float(found[0]):.2f} -> {float(found[-1]):.2f}, {programs} program{'s' if programs > 1 else ''}"
        )

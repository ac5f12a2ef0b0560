"""Reinforcement learning with TRL's GRPO and a toy reward: answers with many nines are good. It generates with whole weights.

python examples/huggingface/grpo.py
torchrun --nproc-per-node 2 examples/huggingface/grpo.py
"""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from tiny_llama import WORDS, arguments, llama, options, sentences, tokenizer, told
from trl import GRPOConfig, GRPOTrainer

import zgraph

NINE = WORDS.index("nine")


def nines(completion_ids: list[list[int]], **rest: Any) -> list[float]:
    """The share of an answer's words that are "nine"."""
    return [ids.count(NINE) / max(1, len(ids)) for ids in completion_ids]


def main() -> None:
    given = options(__doc__, steps=40)
    trainer = GRPOTrainer(
        llama(),
        nines,
        args=GRPOConfig(**arguments(given, batch=16), num_generations=8, max_completion_length=4, beta=0.0),
        train_dataset=Dataset.from_list([{"prompt": text.partition(" is ")[0]} for text in sentences()]),
        processing_class=tokenizer(),
    )
    zgraph.hf.attach(trainer, zgraph.Plan(zero=3, backend=given.backend))
    trainer.train()
    told(trainer, "reward")


if __name__ == "__main__":
    main()

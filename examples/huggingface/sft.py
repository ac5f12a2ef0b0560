"""Supervised fine-tuning with TRL: whole sentences, padded to the longest of a batch.

python examples/huggingface/sft.py
torchrun --nproc-per-node 2 examples/huggingface/sft.py
"""

from __future__ import annotations

from datasets import Dataset
from tiny_llama import arguments, llama, options, sentences, tokenizer, told
from trl import SFTConfig, SFTTrainer

import zgraph


def main() -> None:
    given = options(__doc__, steps=60)
    trainer = SFTTrainer(
        llama(),
        args=SFTConfig(**arguments(given)),
        train_dataset=Dataset.from_list([{"text": text} for text in sentences()]),
        processing_class=tokenizer(),
    )
    zgraph.hf.attach(trainer, zgraph.Plan(zero=3, backend=given.backend))
    trainer.train()
    told(trainer)


if __name__ == "__main__":
    main()

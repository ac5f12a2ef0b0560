"""transformers' Trainer, on as many ranks as are started, with the weights, gradients and states divided over them.

python examples/huggingface/trainer.py
torchrun --nproc-per-node 2 examples/huggingface/trainer.py
"""

from __future__ import annotations

from tiny_llama import arguments, llama, options, rows, tokenizer, told
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

import zgraph


def main() -> None:
    given = options(__doc__, steps=60)
    trainer = Trainer(
        llama(),
        TrainingArguments(**arguments(given)),
        train_dataset=rows(),
        data_collator=DataCollatorForSeq2Seq(tokenizer()),
    )
    zgraph.hf.attach(trainer, zgraph.Plan(zero=3, backend=given.backend))
    trainer.train()
    trainer.save_model(given.folder + "/trained")  # as `from_pretrained` reads it
    told(trainer)


if __name__ == "__main__":
    main()

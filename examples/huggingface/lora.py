"""An adapter of PEFT's: the base weights are divided over the ranks and gathered, never reduced, and the adapter is saved whole.

python examples/huggingface/lora.py
torchrun --nproc-per-node 2 examples/huggingface/lora.py
"""

from __future__ import annotations

from peft import LoraConfig, get_peft_model
from tiny_llama import arguments, llama, options, rows, tokenizer, told
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

import zgraph


def main() -> None:
    given = options(__doc__, steps=60)
    model = get_peft_model(
        llama(), LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    )
    trainer = Trainer(
        model,
        TrainingArguments(**arguments(given)),
        train_dataset=rows(),
        data_collator=DataCollatorForSeq2Seq(tokenizer()),
    )
    zgraph.hf.attach(trainer, zgraph.Plan(zero=3, backend=given.backend))
    trainer.train()
    trainer.save_model(given.folder + "/adapter")
    told(trainer)


if __name__ == "__main__":
    main()

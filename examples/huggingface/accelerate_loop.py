"""A loop of one's own with accelerate: gradients of two batches a step, and a state that goes on on any number of ranks.

python examples/huggingface/accelerate_loop.py
accelerate launch --num_processes 2 examples/huggingface/accelerate_loop.py
"""

from __future__ import annotations

import itertools

import torch
from accelerate import Accelerator
from tiny_llama import llama, options, rows, tokenizer
from transformers import DataCollatorForSeq2Seq

import zgraph


def main() -> None:
    given = options(__doc__, steps=30)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    model = zgraph.compile(llama(), zgraph.Plan(zero=3, backend=given.backend))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    each = 8 // accelerator.num_processes
    loader = torch.utils.data.DataLoader(rows(), each, collate_fn=DataCollatorForSeq2Seq(tokenizer()))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), 2 * given.steps):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.gather(loss.detach()).mean()))
    accelerator.save_state(given.folder + "/state")
    accelerator.print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, {len(model.zgraph.programs)} program")


if __name__ == "__main__":
    main()

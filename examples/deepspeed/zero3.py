"""A ZeRO-3 loop: bf16 off for the comparison, 4 micro-batches a step, clipping, a warm-up, the optimizer's states in the host's memory."""

import torch
from torch import nn

import zgraph.deepspeed as deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e5,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
}


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.inner = nn.Linear(dim, 4 * dim)
        self.outer = nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.outer(nn.functional.gelu(self.inner(self.norm(x))))


class Model(nn.Module):
    def __init__(self, vocabulary=32, dim=16, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


def main(steps=5):
    deepspeed.init_distributed()
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(model=Model(), config=CONFIG)
    losses = []
    data = torch.Generator().manual_seed(engine.global_rank)
    for _ in range(steps * engine.gradient_accumulation_steps()):
        ids = torch.randint(32, (2, 8), generator=data)
        loss = engine(ids, labels=ids.roll(-1, 1))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if engine.global_rank == 0 and engine.micro_steps % engine.gradient_accumulation_steps() == 0:
            print(f"step {engine.global_steps}: loss {loss.item():.4f}, lr {engine.get_lr()[0]:.5f}")
    return losses


if __name__ == "__main__":
    main()

"""`deepspeed.checkpointing.checkpoint` in a forward: what the blocks hold is computed again in the backward."""

import torch
from torch import nn

import zgraph.deepspeed as deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
    "activation_checkpointing": {"partition_activations": False, "number_checkpoints": 2},
    "zero_optimization": {"stage": 2},
}


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        return x + self.layers(x)


class Model(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = deepspeed.checkpointing.checkpoint(block, x)
        return (x**2).mean()


def main(steps=4):
    deepspeed.init_distributed()
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(model=Model(), config=CONFIG)
    deepspeed.checkpointing.configure(mpu_=None, num_checkpoints=2)
    losses = []
    data = torch.Generator().manual_seed(engine.global_rank)
    for _ in range(steps):
        x = torch.randn(4, 16, generator=data).requires_grad_()
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(main())

"""ZeRO stages one after another in one process: the weights go on, each stage begins with a new optimizer."""

import torch
from torch import nn

import zgraph.deepspeed as deepspeed


def config(stage, micro_batches):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
    }


def main(order=((2, 1), (3, 1), (3, 2), (1, 2), (0, 1), (2, 1)), steps=2):
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    losses = []
    data = torch.Generator().manual_seed(deepspeed.comm.get_rank())
    for stage, micro_batches in order:
        engine, *_ = deepspeed.initialize(model=model, config=config(stage, micro_batches))
        for _ in range(steps * engine.gradient_accumulation_steps()):
            x = torch.randn(2, 8, generator=data)
            loss = nn.functional.mse_loss(engine(x), x.flip(1))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        model = engine.module
        engine.destroy()
    return losses


if __name__ == "__main__":
    print(main())

"""torch's profiler around steps, and what the process holds in memory."""

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import zgraph.deepspeed as deepspeed
from zgraph.deepspeed.runtime.utils import see_memory_usage

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 1},
    "steps_per_print": 2,
}


def main(steps=3):
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
    losses = []
    data = torch.Generator().manual_seed(engine.global_rank)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            x = torch.randn(4, 8, generator=data)
            loss = nn.functional.mse_loss(engine(x), x.flip(1))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    see_memory_usage("after training", force=True)
    assert profiler.key_averages()
    return losses


if __name__ == "__main__":
    print(main())

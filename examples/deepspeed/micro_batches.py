"""The number of micro-batches of a step changed on the way, and a boundary that the script sets itself."""

import torch
from torch import nn

import zgraph.deepspeed as deepspeed

CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 2},
}


def main(sizes=(8, 16, 4)):
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
    losses = []
    data = torch.Generator().manual_seed(engine.global_rank)

    def micro_batch():
        x = torch.randn(2, 8, generator=data)
        loss = nn.functional.mse_loss(engine(x), x.flip(1))
        engine.backward(loss)
        losses.append(loss.item())

    for size in sizes:
        engine.set_train_batch_size(size)
        for _ in range(2 * engine.gradient_accumulation_steps()):
            micro_batch()
            engine.step()
    for last in (False, False, True):  # (one step of three micro-batches; the loss is divided as before)
        engine.set_gradient_accumulation_boundary(last)
        micro_batch()
    engine.step()
    micro_batch()
    return losses


if __name__ == "__main__":
    print(main())

"""A checkpoint saved by a tag, with the script's own state and the schedule's place, and loaded into a new engine."""

import sys
import tempfile

import torch
from torch import nn

import zgraph.deepspeed as deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 10, "warmup_num_steps": 3, "warmup_max_lr": 0.01},
    },
    "zero_optimization": {"stage": 2},
}


def made(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    return deepspeed.initialize(model=model, config=CONFIG)[0]


def trained(engine, steps, epoch):
    losses = []
    data = torch.Generator().manual_seed(10 * epoch + engine.global_rank)
    for _ in range(steps):
        x = torch.randn(4, 8, generator=data)
        loss = nn.functional.mse_loss(engine(x), x.flip(1))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main(folder):
    deepspeed.init_distributed()
    engine = made(0)
    losses = trained(engine, 3, epoch=0)
    assert engine.save_checkpoint(folder, tag="epoch0", client_state={"epoch": 0})
    losses += trained(engine, 3, epoch=1)

    other = made(1)
    path, client = other.load_checkpoint(folder, tag="epoch0")
    assert path is not None and other.global_steps == 3 and client["epoch"] == 0
    again = trained(other, 3, epoch=1)
    return losses + again + other.get_lr()


if __name__ == "__main__":
    print(main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))

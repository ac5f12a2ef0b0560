"""Writes a checkpoint, a bundle and a plan file of a small model, with the numbers that its training goes on to.

    ZGRAPH_BUNDLE=OUT/bundle torchrun --nproc-per-node 2 tests/data/write.py OUT

`tests/data/1eb672d.zip` is a folder that commit 1eb672d wrote so. `test_older_files` reads it with today's code.
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import zgraph

PLAN = {
    "backend": "eager",
    "zero": 3,
    "micro_batches": 2,
    "recompute": ["1"],
    "grad_clip": 1.0,
    "ema": 0.9,
    "optimizer": {"name": "AdamW", "lr": 0.01, "weight_decay": 0.1},
    "lr_schedule": {"name": "Linear", "warmup_steps": 2, "total_steps": 10},
}


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 4, generator=generator)


def train(compiled: torch.nn.Module, first: int, rank: int) -> list[float]:
    """Three steps from step `first` on: the mean square of each step's output on this rank."""
    return [float(compiled.train_step(*batch(step, rank)).square().mean()) for step in range(first, first + 3)]


def main() -> None:
    out = Path(sys.argv[1])
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    plan = zgraph.Plan(**PLAN)
    compiled = zgraph.compile(model(), plan, loss_fn=lambda out, y: F.mse_loss(out, y))
    means = train(compiled, 0, rank)
    compiled.save_checkpoint(str(out / "checkpoint"), client_state={"means": means})
    means = [means, train(compiled, 3, rank)]
    compiled.zgraph.finish()
    gathered: list = [None, None]
    torch.distributed.all_gather_object(gathered, means)
    if rank == 0:
        plan.save(out / "plan.toml")
        (out / "means.json").write_text(json.dumps(gathered, indent=1) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""A run that goes on when it loses ranks, and when they come back.

torchrun starts it again with the ranks that there are. Each time it loads the last checkpoint, which any number of ranks can, and goes on
with the row after the last one that it was trained on. The plan says how many rows a step has; how many of them are a rank's,
and in how many micro-batches, follows from the ranks. Two agents on one machine stand for two machines:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1   # else a machine that joins later is never told where to meet (torch 2.13)
    torchrun --nnodes=1:2 --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=localhost:29400 \\
        --rdzv-conf=last_call_timeout=5 --local-addr=localhost examples/train_elastic.py

Start it in two terminals, kill the second (`kill -9`, its worker too), start it there again. Every rank prints its step, the ranks
there are, its rows, and the loss of all ranks. Alone (`python examples/train_elastic.py`) it prints the same losses.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zgraph


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), y)


class Data:
    """4096 rows, in another order in each epoch. What the n-th row of a run is depends on n alone, not on how many ranks there are."""

    def __init__(self, size: int = 4096) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 16, generator=generator)
        self.y = (self.x @ torch.randn(16, 4, generator=generator)).argmax(1)

    def rows(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        size = len(self.x)
        epochs = range(first // size, (first + count - 1) // size + 1)
        orders = [torch.randperm(size, generator=torch.Generator().manual_seed(epoch)) for epoch in epochs]
        chosen = torch.cat(orders)[first % size :][:count]
        return self.x[chosen], self.y[chosen]


def factory() -> tuple[Net, tuple[Tensor, Tensor]]:
    """The model and some rows: what `zgraph dump train_elastic` looks at."""
    return Net(), Data().rows(0, 8)


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    plan = zgraph.Plan(
        zero=3,
        backend=args.backend,
        optimizer=zgraph.AdamW(lr=3e-3),
        elastic=zgraph.Elastic(batch=args.batch, micro_batch=args.micro_batch),
    )
    model = zgraph.compile(Net(), plan)
    if (args.folder / "latest").exists():
        model.load_checkpoint(args.folder)

    data = Data()
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    rows = model.zgraph.plan.elastic.rows  # of each rank
    while model.zgraph.samples < args.steps * args.batch:
        step = model.zgraph.samples // args.batch + 1
        first = model.zgraph.samples + rank * rows
        loss = model.train_step(*data.rows(first, rows))
        if world > 1:
            dist.all_reduce(loss)
        print(
            f"step {step} world {world} rows {first} to {first + rows - 1} loss {loss.item() / world:.6f}", flush=True
        )
        if step % args.save_every == 0:
            model.save_checkpoint(args.folder, async_=True, keep_last=2)
        time.sleep(args.pause)
    model.zgraph.finish()


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path("elastic_checkpoints"), help="of the checkpoints, seen by all machines"
    )
    parser.add_argument("--steps", type=int, default=200, help="of the whole run, those before a restart included")
    parser.add_argument("--batch", type=int, default=24, help="rows of a step over all ranks")
    parser.add_argument("--micro-batch", type=int, default=8, help="the most rows that a rank takes at once")
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS", help="between checkpoints")
    parser.add_argument(
        "--pause", type=float, default=0.3, metavar="SECONDS", help="after each step: time to kill ranks"
    )
    parser.add_argument("--backend", choices=("eager", "inductor"), default="eager", help="eager starts at once")
    try:
        train(parser.parse_args())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Tensor parallelism, measured: a step beside torch's own `parallelize_module`, over links of two rates.

    python benchmarks/tensor_parallel.py [--rounds 7] [--width 512] [--layers 8] [--batch 4] [--length 128] [--out FOLDER]

The same GPT, data and link for both, on two ranks with a thread each, in one run, steps in turn. The blocks are divided in Megatron's way,
columns, then rows: by `parallelize_module`, and by a table of a plan; embedding and head are whole for both (the loss of divided logits
is another in each). Where zgraph compiles, torch's blocks are compiled, too. The link (`benchmarks/link/zlink.cpp`) is first as fast as
copies are, then so slow that communication is a third of torch's step. Gradients of both are compared.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import machine

RESULTS = Path(__file__).parent / "results"
LATENCY_US = 20.0
GOALS = {"unlimited": 1.0, "a third of the step": 0.9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    import torch.multiprocessing as mp

    folder = Path(tempfile.mkdtemp(prefix="tensor_parallel"))
    try:
        mp.spawn(rank_of, args=(options, str(folder)), nprocs=2)
        found = json.loads((folder / "found.json").read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = table(found, options)
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "tensor_parallel.md").write_text(text)


def model_of(options: argparse.Namespace) -> Any:
    """A GPT that takes tokens and targets and gives its loss; heads are counted by what a projection gives."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    width, head = options.width, 64

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
            self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm1(x)
            q, k, v = (p(y).unflatten(-1, (-1, head)).transpose(1, 2) for p in (self.q, self.k, self.v))
            x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(options.vocabulary, width)
            self.blocks = nn.ModuleList(Block() for _ in range(options.layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, options.vocabulary, bias=False)

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    return GPT()


def by_torch(model: Any, compiled: bool) -> Any:
    """The model with its blocks divided by `parallelize_module`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    columns, rows = ColwiseParallel, RowwiseParallel
    for block in model.blocks:
        plan = {"q": columns(), "k": columns(), "v": columns(), "out": rows(), "up": columns(), "down": rows()}
        parallelize_module(block, mesh, plan, src_data_rank=None)
        if compiled:
            block.compile()
    return model


def rank_of(rank: int, options: argparse.Namespace, folder: str) -> None:
    import torch
    import torch.distributed as dist
    from link import zlink

    import zgraph

    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]})
    dist.init_process_group("zlink", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    plain = model_of(options)
    torch.manual_seed(1)
    tokens, targets = (torch.randint(0, options.vocabulary, (options.batch, options.length)) for _ in range(2))
    found: dict[str, Any] = {}
    for backend in ("eager", "inductor"):
        table = {f"blocks.*.{n}": "colwise" for n in ("q", "k", "v", "up")}
        table |= {f"blocks.*.{n}": "rowwise" for n in ("out", "down")}
        plan = zgraph.Plan(mesh={"tp": 2}, tensor_parallel=table, backend=backend)
        mine = zgraph.compile(copy.deepcopy(plain), plan, inputs=(tokens, targets))
        theirs = by_torch(copy.deepcopy(plain), backend == "inductor")

        def step(name: str, mine: Any = mine, theirs: Any = theirs) -> None:
            if name == "zgraph":
                mine(tokens, targets).backward()
            else:
                theirs(tokens, targets).backward()

        for name in ("zgraph", "torch"):
            for _ in range(2):
                step(name)
        compare(mine, theirs)
        zlink.set_link(0.0, 0.0)
        dist.barrier()
        free = measured(step, (mine, theirs), options.rounds)
        gbps = _third(free["torch"], free["wire"]["torch"])
        dist.barrier()
        zlink.set_link(gbps, LATENCY_US)
        dist.barrier()
        slow = measured(step, (mine, theirs), options.rounds)
        zlink.set_link(0.0, 0.0)
        dist.barrier()
        found[backend] = {"unlimited": free, "a third of the step": slow, "gbps": gbps}
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _third(seconds: float, wire: float) -> float:
    """The rate in Gbit/s, alike on both ranks, at which so many bytes take half of what the step takes without them."""
    import torch
    import torch.distributed as dist

    both = torch.tensor([seconds, wire], dtype=torch.float64)
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return float(8 * both[1] / (both[0] / 2) / 1e9)


def measured(step: Any, models: tuple[Any, Any], rounds: int) -> dict[str, Any]:
    """Median seconds of a step of each, the slower rank's, and the bytes that it puts on the wire."""
    import torch
    import torch.distributed as dist
    from link import zlink

    times: dict[str, list[float]] = {"zgraph": [], "torch": []}
    wire: dict[str, float] = {}
    for number in range(rounds + 1):
        for name in ("zgraph", "torch") if number % 2 else ("torch", "zgraph"):
            for model in models:
                model.zero_grad()
            dist.barrier()
            zlink.stats(reset=True)
            start = time.perf_counter()
            step(name)
            mine = torch.tensor(time.perf_counter() - start)
            wire[name] = zlink.stats(reset=True)[1]
            dist.all_reduce(mine, op=dist.ReduceOp.MAX)
            times[name].append(float(mine))
    return {name: statistics.median(taken[1:]) for name, taken in times.items()} | {"wire": wire}


def compare(mine: Any, theirs: Any) -> None:
    """Both have done the same work: their gradients are equal but for rounding."""
    others = dict(theirs.named_parameters())
    for name, param in mine.named_parameters():
        one, two = (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in (param, others[name]))
        assert float((one - two).norm()) <= 1e-4 * float(two.norm()) + 1e-7, name


def table(found: dict[str, Any], options: argparse.Namespace) -> str:
    lines = [
        "# Tensor parallelism beside torch's parallelize_module",
        "",
        f"2 ranks; {options.layers} layers of width {options.width}, {options.vocabulary} words, {options.batch} sequences of "
        f"{options.length} tokens; forward and backward.",
        "",
        "| | link | zgraph | torch | ratio | goal | | wire, zgraph | wire, torch |",
        "|---|---|---:|---:|---:|---:|---|---:|---:|",
    ]
    for backend, rates in found.items():
        for rate, goal in GOALS.items():
            row = rates[rate]
            ratio = row["zgraph"] / row["torch"]
            shown = rate if rate == "unlimited" else f"{rates['gbps']:.2f} Gbit/s ({rate})"
            wire = " | ".join(f"{row['wire'][n] / 1e6:.1f} MB" for n in ("zgraph", "torch"))
            lines.append(
                f"| {backend} | {shown} | {row['zgraph']:.3f} s | {row['torch']:.3f} s | {ratio:.3f} | {goal} | "
                f"{'met' if ratio <= goal else 'missed'} | {wire} |"
            )
    conditions = (
        f"Conditions: {machine.conditions()}, one thread and one core a rank. Medians of {options.rounds} rounds."
    )
    return "\n".join([*lines, "", conditions, ""])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

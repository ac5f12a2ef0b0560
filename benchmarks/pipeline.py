"""Pipelines, measured: how long ranks idle by each schedule, and a step beside torch.distributed.pipelining's.

    python benchmarks/pipeline.py [--rounds 7] [--ranks 4] [--micro-batches 8] [--milliseconds 40] [--out FOLDER]

*Bubbles.* Every stage's forward, gradient of inputs and gradient of weights take the same time: an operator that sleeps. So the ranks need
no core each, and what is measured is the order of the schedule, the transfers and the run time's own work. Beside it stands the formula, of
what the operator takes when it is called alone (it sleeps a little longer than it was told to).

*Beside torch.* The same GPT, cut at the same modules into as many stages as there are cores, by the same schedule on the same batch:
`train_step` of a plan without an optimizer, and `torch.distributed.pipelining` driven by hand with the stages as modules, compiled by
torch.compile where zgraph compiles. Steps alternate in one run; the ratio is the median of those of neighbours.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine

RESULTS = Path(__file__).parent / "results"
FORMULAS: dict[str, Callable[[int, int], float]] = {
    "gpipe": lambda p, m: (p - 1) / (m + p - 1),
    "1f1b": lambda p, m: (p - 1) / (m + p - 1),
    "interleaved1f1b": lambda p, m: (p - 1) / (2 * m + p - 1),
}
SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "zb", "zbv")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--milliseconds", type=float, default=40.0)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--only", choices=("bubbles", "torch"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    import torch.multiprocessing as mp

    folder = Path(tempfile.mkdtemp(prefix="pipeline"))
    lines = ["# Pipelines", ""]
    try:
        if options.only != "torch":
            mp.spawn(bubbles, args=(options, str(folder)), nprocs=options.ranks)
            lines += bubble_table(json.loads((folder / "bubbles.json").read_text()), options)
        if options.only != "bubbles":
            (folder / "meet").unlink(missing_ok=True)
            mp.spawn(beside, args=(options, str(folder)), nprocs=2)
            lines += beside_table(json.loads((folder / "beside.json").read_text()), options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    lines += [f"Conditions: {machine.conditions()}, one thread a rank. Medians of {options.rounds} rounds.", ""]
    print("\n".join(lines))
    if options.only is None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "pipeline.md").write_text("\n".join(lines))


def join(rank: int, ranks: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)


# -- bubbles ------------------------------------------------------------------------------------------------------------
def sleeping_model(layers: int, seconds: float) -> Any:
    """Layers whose forward, gradient of the input and gradient of the weight each sleep as long."""
    import torch
    from torch import nn

    @torch.library.custom_op("bench::sleep", mutates_args=(), schema="(Tensor x, Tensor weight) -> Tensor")
    def sleep(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        time.sleep(seconds)
        return x * weight

    @sleep.register_fake
    def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    class Sleeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return torch.ops.bench.sleep(x, weight)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, weight = ctx.saved_tensors
            return torch.ops.bench.sleep(grad, weight), torch.ops.bench.sleep(grad, x).sum(0)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Sleeping.apply(x, self.weight)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(64))  # (so that the first stage has a gradient of its input, too)
            self.layers = nn.ModuleList(Layer() for _ in range(layers))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.shift
            for layer in self.layers:
                x = layer(x)
            return x.mean()

    return Model()


def bubbles(rank: int, options: argparse.Namespace, folder: str) -> None:
    import torch
    import torch.distributed as dist

    import zgraph

    join(rank, options.ranks, folder)
    p, m = options.ranks, options.micro_batches
    layers = 2 * p  # (two stages a rank, or one of two layers)
    seconds = options.milliseconds / 1e3 / 2
    found: dict[str, Any] = {}
    for schedule in SCHEDULES:
        plan = zgraph.Plan(mesh={"pp": p}, micro_batches=m, schedule=schedule, backend="eager", partition="uniform")
        model = zgraph.compile(sleeping_model(layers, seconds), plan)
        torch.manual_seed(0)  # (ranks of a pipeline have the same rows)
        x = torch.randn(2 * m, 64)
        took = []
        alone = []
        for _ in range(options.rounds + 1):
            dist.barrier()
            alone.append(duration(torch.ops.bench.sleep, x, x))
            dist.barrier()
            start = time.perf_counter()
            model.train_step(x)
            mine = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(mine, op=dist.ReduceOp.MAX)
            took.append(float(mine))
            model.zero_grad()
        found[schedule] = {"seconds": statistics.median(took[1:]), "third": 2 * statistics.median(alone[1:])}
    if rank == 0:
        (Path(folder) / "bubbles.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def duration(call: Callable[..., Any], *args: Any) -> float:
    start = time.perf_counter()
    call(*args)
    return time.perf_counter() - start


def bubble_table(found: dict[str, Any], options: argparse.Namespace) -> list[str]:
    p, m = options.ranks, options.micro_batches
    lines = [
        f"## Bubbles: {p} ranks, {m} micro-batches, each third of a stage's work {options.milliseconds:g} ms",
        "",
        "| schedule | step | a third, alone | idle | formula | step / formula's | of 1f1b |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    ratios = {}
    for schedule, times in found.items():
        busy = m * 3 * times["third"]
        idle, wanted = 1 - busy / times["seconds"], ""
        if schedule in FORMULAS:
            formula = FORMULAS[schedule](p, m)
            ratios[schedule] = times["seconds"] * (1 - formula) / busy
            wanted = f"{formula:.1%}"
        cells = [
            schedule,
            f"{times['seconds']:.3f} s",
            f"{times['third'] * 1e3:.2f} ms",
            f"{idle:.1%}",
            wanted,
            f"{ratios[schedule]:.3f}" if schedule in ratios else "",
            f"{times['seconds'] / found['1f1b']['seconds']:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    worst = max(ratios.values())
    zb = 1 - found["zb"]["seconds"] / found["1f1b"]["seconds"]
    return [
        *lines,
        "",
        "| goal | | measured | |",
        "|---|---:|---:|---|",
        f"| step / formula's, at most | 1.05 | {worst:.3f} | {'met' if worst <= 1.05 else 'missed'} |",
        f"| zb faster than 1f1b by, at least | 15% | {zb:.1%} | {'met' if zb >= 0.15 else 'missed'} |",
        "",
    ]


# -- beside torch -------------------------------------------------------------------------------------------------------
def gpt(width: int, layers: int) -> Any:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.LayerNorm(width)
            self.qkv = nn.Linear(width, 3 * width)
            self.out = nn.Linear(width, width)
            self.after = nn.LayerNorm(width)
            self.up = nn.Linear(width, 4 * width)
            self.down = nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, _ = x.shape
            parts = self.qkv(self.before(x)).view(batch, length, 3, 8, width // 8).permute(2, 0, 3, 1, 4)
            seen = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
            x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(nn.functional.gelu(self.up(self.after(x))))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(1024, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, 1024, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    return GPT()


def loss_of(logits: Any, targets: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def by_hand(
    rank: int, model: Any, layers: int, schedule: str, micro_batches: int, compiled: bool
) -> Callable[..., Any]:
    """A step of torch.distributed.pipelining: this rank's half of the model as a module."""
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from torch.distributed.pipelining.schedules import Schedule1F1B

    half = layers // 2

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = model.embed, model.blocks[:half]

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return x

    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.norm, self.head = model.blocks[half:], model.norm, model.head

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    part: Any = (First, Second)[rank]()
    if compiled:
        part.compile()
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
    made = kind(stage, micro_batches, loss_fn=loss_of)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> None:
        if rank == 0:
            made.step(tokens)
        else:
            made.step(target=targets, losses=[])

    return step


def beside(rank: int, options: argparse.Namespace, folder: str) -> None:
    import copy

    import torch
    import torch.distributed as dist

    import zgraph

    join(rank, 2, folder)
    m, layers = options.micro_batches, options.layers
    plain = gpt(options.width, layers)
    torch.manual_seed(1)
    tokens, targets = torch.randint(0, 1024, (m, 128)), torch.randint(0, 1024, (m, 128))
    found: dict[str, Any] = {}
    for backend in ("eager", "inductor"):
        for schedule in ("gpipe", "1f1b"):
            plan = zgraph.Plan(
                mesh={"pp": 2}, micro_batches=m, schedule=schedule, backend=backend, partition=[f"blocks.{layers // 2}"]
            )
            model = zgraph.compile(copy.deepcopy(plain), plan, loss_fn=lambda logits, t: loss_of(logits, t))
            other = copy.deepcopy(plain)
            hand = by_hand(rank, other, layers, schedule, m, backend == "inductor")
            times: dict[str, list[float]] = {"zgraph": [], "torch": []}
            for number in range(options.rounds + 2):
                for name in ("zgraph", "torch") if number % 2 else ("torch", "zgraph"):
                    dist.barrier()
                    start = time.perf_counter()
                    if name == "zgraph":
                        model.train_step(tokens, targets)
                    else:
                        hand(tokens, targets)
                    mine = torch.tensor(time.perf_counter() - start)
                    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
                    times[name].append(float(mine))
                if number == 0:
                    check(model, other)
                model.zero_grad()
                other.zero_grad()
            pairs = zip(times["zgraph"][2:], times["torch"][2:], strict=True)
            medians = {n: statistics.median(t[2:]) for n, t in times.items()}
            found[f"{backend}, {schedule}"] = medians | {"ratio": statistics.median(a / b for a, b in pairs)}
    if rank == 0:
        (Path(folder) / "beside.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def check(model: Any, other: Any) -> None:
    """Both have done the same work: their gradients are equal but for rounding."""
    theirs = dict(other.named_parameters())
    compared = 0
    for name, param in model.named_parameters():
        mine, grad = param.grad, theirs[name].grad
        if mine is not None and grad is not None:
            assert float((mine - grad).norm()) <= 1e-4 * float(grad.norm()) + 1e-7, name
            compared += 1
    assert compared, "no gradient was compared"


def beside_table(found: dict[str, Any], options: argparse.Namespace) -> list[str]:
    lines = [
        f"## Beside torch.distributed.pipelining: 2 ranks, {options.micro_batches} micro-batches of 128 tokens, "
        f"{options.layers} layers of width {options.width}",
        "",
        "| | zgraph | torch | ratio | goal | |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for name, times in found.items():
        ratio = times["ratio"]
        lines.append(
            f"| {name} | {times['zgraph']:.3f} s | {times['torch']:.3f} s | {ratio:.3f} | 1.0 | {'met' if ratio <= 1 else 'missed'} |"
        )
    return [*lines, ""]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

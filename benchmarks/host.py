"""What the host does for a step besides the compiled programs, beside `fully_shard` with compiled layers; and what votes cost.

    OMP_NUM_THREADS=1 python benchmarks/host.py [--layers 18 75] [--micro-batches 1 8] [--stages 1 3] [--steps 10] [--rounds 3] [--out FILE]
    OMP_NUM_THREADS=1 python benchmarks/host.py --votes [--ranks 2 4 8 16]

*A step.* Transformer blocks of 12 parameters each, so narrow that they compute next to nothing, on two gloo ranks with a thread each; a
step is all micro-batches' forwards and backwards, and AdamW. zgraph's is `train_step`, `fully_shard`'s the usual loop (a step's gradients
are reduced once at stage 1, where weights stay whole until its last backward; each time at stage 3), each of its blocks compiled by
`torch.compile`. Counted is the processor time of the calling thread (`time.thread_time`), as the median over steps of the smallest of all
rounds, on rank 0: *outside* is without what runs inside of compiled programs (zgraph's executables, which hold its collectives; Inductor's
graphs of a block), *whole* is all of it. zgraph's programs are run operator by operator (`backend="eager"`): what is inside is not looked
at, and compiling 75 blocks is not either.

*Votes.* `Agreement.vote` on as many ranks, all on this machine (where these are more than its cores, ranks wait for the processor): the time of
one in the median round and in the fastest, and that by the alpha-beta model at 1,024 ranks, of the least latency that a message between two
ranks is measured to have (its bandwidth does not matter: a vote is of 80 bytes).
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import machine
import torch
import torch.distributed as dist
from torch import nn

from zgraph.ranks.tree_maximum import neighbours

GOAL = 0.6  # of `fully_shard`'s time outside of compiled programs
STEP, SHARE = 0.1, 0.01  # votes cost less than this share of a step of so many seconds
MANY = 1024  # ranks
WIDTH, VOCABULARY, ROWS, LENGTH = 16, 32, 1, 4


class Block(nn.Module):
    """Attention and a perceptron: 12 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.first(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Model(nn.Module):
    """Blocks between an embedding and a head: 12 parameters a block, and 4."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


# -- a step ----------------------------------------------------------------------------------------------------------
class Inside:
    """Processor time of this thread inside of compiled programs."""

    seconds = 0.0
    depth = 0

    @classmethod
    def timed(cls, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            cls.depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                cls.depth -= 1
                if not cls.depth:
                    cls.seconds += time.thread_time() - begin

        return run


def zgraph_step(model: nn.Module, stage: int, parts: int, batch: tuple[torch.Tensor, ...]) -> Callable[[], Any]:
    """Steps of zgraph's `train_step`."""
    import zgraph
    from zgraph.codegen.executable import Executable

    made = Executable.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.function = Inside.timed(self.function)

    Executable.__init__ = init  # type: ignore[method-assign]
    optimizer = zgraph.AdamW(lr=1e-3)
    plan = zgraph.Plan(zero=stage, backend="eager", micro_batches=parts, optimizer=optimizer, hardware="default")
    compiled = zgraph.compile(model, plan)
    return lambda: compiled.train_step(*batch)


def fully_shard_step(model: nn.Module, stage: int, parts: int, batch: tuple[torch.Tensor, ...]) -> Callable[[], Any]:
    """Steps of `fully_shard` over the blocks and the model, each block compiled."""
    from torch._inductor.output_code import CompiledFxGraph
    from torch.distributed.fsdp import fully_shard

    CompiledFxGraph.__call__ = Inside.timed(CompiledFxGraph.__call__)  # type: ignore[method-assign]
    kept = stage < 3
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, reshard_after_forward=not kept)
        block.compile()
    sharded: Any = fully_shard(model, reshard_after_forward=not kept)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        for part in range(parts):
            last = part + 1 == parts
            if kept:
                sharded.set_requires_gradient_sync(last)
                sharded.set_reshard_after_backward(last)
            rows = slice(part * ROWS, (part + 1) * ROWS)
            loss = model(*(x[rows] for x in batch))
            loss.backward(torch.tensor(1 / parts))
        optimizer.step()
        optimizer.zero_grad()

    return step


SIDES = {"zgraph": zgraph_step, "fully_shard": fully_shard_step}


def measure_steps(side: str, layers: int, stage: int, parts: int, steps: int, rounds: int) -> dict[str, float]:
    """Milliseconds of one step on this rank, by what is counted; and the number of parameters."""
    torch.manual_seed(0)
    model = Model(layers)
    parameters = len(list(model.parameters()))
    rows = (ROWS * parts, LENGTH)
    batch = (torch.randint(VOCABULARY, rows), torch.randint(VOCABULARY, rows))
    step = SIDES[side](model, stage, parts, batch)
    for _ in range(4):
        step()
    found: list[tuple[float, float]] = []
    for _ in range(rounds):
        times = []
        for _ in range(steps):
            dist.barrier()
            Inside.seconds, begin = 0.0, time.thread_time()
            step()
            whole = time.thread_time() - begin
            times.append((whole - Inside.seconds, whole))
        found.append(tuple(statistics.median(t) for t in zip(*times, strict=True)))  # type: ignore[arg-type]
    outside, whole = (min(column) * 1e3 for column in zip(*found, strict=True))
    return {"outside": outside, "whole": whole, "parameters": parameters}


# -- votes -----------------------------------------------------------------------------------------------------------
def measure_votes(rounds: int) -> dict[str, float]:
    """Microseconds of one vote and of one message's way, on these ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    from zgraph.ranks.agreement import Agreement

    agreement = Agreement(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))

    def vote() -> None:
        agreement.vote("a step", "inputs (int64[1, 4]); known")

    usual, least, processor = _timed(vote, rounds)
    _, message, _ = _timed(_there_and_back, rounds)
    return {"usual": usual, "least": least, "processor": processor, "message": message / 2}


def _there_and_back() -> None:
    rank, value = dist.get_rank(), torch.zeros(1)
    if rank < 2:
        (dist.send if rank == 0 else dist.recv)(value, 1 - rank)
        (dist.recv if rank == 0 else dist.send)(value, 1 - rank)


def _timed(action: Callable[[], None], rounds: int) -> tuple[float, float, float]:
    """Microseconds of one action: in the median round of 20, in the fastest, and of this thread's processor time in the median one."""
    for _ in range(20):
        action()
    found = []
    for _ in range(rounds):
        dist.barrier()
        begin = time.perf_counter(), time.thread_time()
        for _ in range(20):
            action()
        found.append(
            [
                (now - then) / 20 * 1e6
                for now, then in zip((time.perf_counter(), time.thread_time()), begin, strict=True)
            ]
        )
    walls, processor = zip(*found, strict=True)
    return statistics.median(walls), min(walls), statistics.median(processor)


# -- processes -------------------------------------------------------------------------------------------------------
def on_ranks(world: int, arguments: list[str]) -> dict[str, float]:
    """What rank 0 of a run of this file on so many ranks prints."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), str(world), f"{folder}/store", *arguments],
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if rank else None,
                env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
                text=True,
            )
            for rank in range(world)
        ]
        said, _ = processes[0].communicate()
        for process in processes:
            process.wait()
        if processes[0].returncode:
            raise SystemExit(f"rank 0 has failed: {arguments}")
    return json.loads(said.splitlines()[-1])  # type: ignore[no-any-return]


def rank_main(rank: int, world: int, store: str, arguments: list[str]) -> None:
    """One rank: measure what the arguments say."""
    torch.set_num_threads(1)
    if os.path.exists("/sys/class/net/lo"):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    kind, *rest = arguments
    if kind == "votes":
        found = measure_votes(int(rest[0]))
    else:
        found = measure_steps(kind, *map(int, rest))
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


# -- tables ----------------------------------------------------------------------------------------------------------
def table_of_steps(options: argparse.Namespace) -> Iterator[str]:
    """Lines of the table of steps."""
    yield "| parameters | stage | micro-batches | zgraph outside | fully_shard outside | ratio | zgraph whole | fully_shard whole | ratio |"
    yield "|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    for layers in options.layers:
        for stage in options.stages:
            for parts in options.micro_batches:
                what = [str(n) for n in (layers, stage, parts, options.steps, options.rounds)]
                ours, theirs = (on_ranks(2, [side, *what]) for side in SIDES)
                cells = [f"| {ours['parameters']:.0f} | {stage} | {parts} |"]
                for kind in ("outside", "whole"):
                    ratio = f"{ours[kind] / theirs[kind]:.2f}"
                    cells.append(f"{ours[kind]:.1f} ms | {theirs[kind]:.1f} ms | {ratio} |")
                yield " ".join(cells)


def table_of_votes(options: argparse.Namespace) -> Iterator[str]:
    """Lines of the table of votes."""
    yield f"| ranks | a vote | the fastest | of a step of {STEP * 1e3:.0f} ms | of the thread's processor time | a message |"
    yield "|---:|---:|---:|---:|---:|---:|"
    message = math.inf
    for world in options.ranks:
        found = on_ranks(world, ["votes", str(options.rounds)])
        message = min(message, found["message"])
        cells = [f"{found[kind]:.0f} µs" for kind in ("usual", "least", "processor", "message")]
        cells.insert(2, f"{found['least'] / STEP / 1e6:.2%}")
        yield f"| {world} | {' | '.join(cells)} |"
    messages = 2 * len(neighbours(0, MANY)[1])
    seconds = messages * message / 1e6
    what = f"{MANY:,}, by the alpha-beta model ({messages} messages one after another)"
    yield f"| {what} | | {seconds * 1e6:.0f} µs | {seconds / STEP:.2%} | | {message:.0f} µs |"


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        rank_main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[18, 75])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--votes", action="store_true", help="measure votes, and no steps")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--out", type=Path, help="where the table goes besides the terminal")
    options = parser.parse_args()
    lines = []
    for line in (table_of_votes if options.votes else table_of_steps)(options):
        print(line, flush=True)
        lines.append(line)
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    lines += ["", f"Conditions: {machine.conditions()}, load average {load} at the end."]
    print("\n".join(lines[-2:]))
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

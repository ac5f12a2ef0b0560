"""Steps of DeepSpeed's front door beside DeepSpeed itself, at each ZeRO stage: steps a second, and memory.

    python benchmarks/beside_deepspeed.py [--stages 0,1,2,3] [--rounds 5] [--steps 5] [--torch-adam] [--out FOLDER]

The same script and configuration for both, with the import changed: a GPT of 20.5 M parameters in fp32, 4 sequences of 128 tokens on each of
two ranks, Adam, no clipping, DeepSpeed's defaults besides. The ranks talk over gloo on this machine's loopback, which nothing slows down;
each has a core and a thread. Each system and stage has two processes, which sleep while others are measured; systems are measured in turn,
the one that begins changes from round to round. A step is an `engine(…)`, `engine.backward`, `engine.step`, from a barrier; its time is that of
the slower rank. `--torch-adam` lets DeepSpeed update by torch's Adam in place of its own, for which it compiles C++ at the first use (minutes).

Memory is what torch's CPU allocator holds at most in two steps after the timed ones, and what the process has at most in these
(`VmHWM`), in which all that it has loaded and compiled is as well. Losses of the first steps are compared.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine

RESULTS = Path(__file__).parent / "results"
SYSTEMS = ("zgraph", "deepspeed")
WORLD, ROWS, LENGTH = 2, 4, 128
LAYERS, WIDTH, HEADS, WORDS = 8, 384, 6, 8192
GOAL = 1.5  # times DeepSpeed's steps a second


# -- a rank -------------------------------------------------------------------------------------------------------------------
def model_of() -> Any:
    """The GPT, which takes tokens and targets and gives its loss."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
            x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    return GPT()


def rank_of(system: str, stage: int, rank: int, store: str, torch_adam: bool) -> None:
    """Build an engine, say its first losses, then measure once for each line on stdin."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    import time

    import torch

    from zgraph.runtime import allocations

    allocations.count()
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD), "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    deepspeed = importlib.import_module("deepspeed" if system == "deepspeed" else "zgraph.deepspeed")
    params = {"lr": 3e-4, "weight_decay": 0.0}
    if torch_adam and system == "deepspeed":
        params |= {"torch_adam": True}
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": {"stage": stage},
    }
    model = model_of()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    data = torch.Generator().manual_seed(rank)
    tokens = torch.randint(WORDS, (ROWS, LENGTH), generator=data)
    targets = torch.randint(WORDS, (ROWS, LENGTH), generator=data)

    def step() -> torch.Tensor:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss

    begin = time.perf_counter()
    losses = [step().item() for _ in range(4)]
    answers.write(json.dumps({"losses": losses, "seconds": time.perf_counter() - begin}) + "\n")
    for line in sys.stdin:
        seconds, spent = [], time.process_time()
        for _ in range(json.loads(line)["steps"]):
            torch.distributed.barrier()
            begin = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begin)
        spent = time.process_time() - spent
        allocations.reset_peak()
        Path("/proc/self/clear_refs").write_text("5")
        step()
        step()
        status = Path("/proc/self/status").read_text()
        resident = int(status.partition("VmHWM:")[2].split()[0]) * 1024
        answers.write(json.dumps([seconds, spent, allocations.peak(), resident]) + "\n")


# -- the run ------------------------------------------------------------------------------------------------------------------
class Pair:
    """Two ranks of a system at a stage."""

    def __init__(self, system: str, stage: int, folder: Path, torch_adam: bool) -> None:
        store = folder / f"{system}{stage}"
        self.processes = []
        for rank in range(WORLD):
            words = [sys.executable, __file__, "--rank", json.dumps([system, stage, rank, str(store), torch_adam])]
            log = (folder / f"{system}{stage}-{rank}.log").open("w")
            pipe, cache = (
                subprocess.PIPE,
                {"ZGRAPH_CACHE": str(folder / "cache")},
            )  # (so that one rank compiles for both)
            started = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=log, text=True, env=os.environ | cache)
            self.processes.append(started)
        self.first = self.receive()
        self.seconds: list[float] = []  # of each step, on the slower rank
        self.spent: list[float] = []  # of the processor, for a step of a rank
        self.peak = self.resident = 0

    def receive(self) -> list[Any]:
        lines = [process.stdout.readline() for process in self.processes]  # type: ignore[union-attr]
        if not all(lines):
            self.stop()
            raise SystemExit(f"a rank has died: see the logs of {self.processes[0].args}")
        return [json.loads(line) for line in lines]

    def measure(self, steps: int) -> None:
        for process in self.processes:
            process.stdin.write(json.dumps({"steps": steps}) + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        found = self.receive()
        self.seconds += [max(each) for each in zip(*(f[0] for f in found), strict=True)]
        self.spent += [f[1] / steps for f in found]
        self.peak = max(self.peak, *(f[2] for f in found))
        self.resident = max(self.resident, *(f[3] for f in found))

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def measured(stage: int, args: argparse.Namespace, folder: Path) -> dict[str, Pair]:
    pairs = {}
    try:
        for system in SYSTEMS:
            pairs[system] = Pair(system, stage, folder, args.torch_adam)
        for number in range(args.rounds):
            for system in SYSTEMS[:: 1 if number % 2 else -1]:
                pairs[system].measure(args.steps)
    finally:
        for pair in pairs.values():
            pair.stop()
    return pairs


def row_of(stage: int, pairs: dict[str, Pair]) -> str:
    mine, theirs = (pairs[system] for system in SYSTEMS)
    one, other = statistics.median(mine.seconds), statistics.median(theirs.seconds)
    ratio, best = other / one, min(theirs.seconds) / min(mine.seconds)
    spent = statistics.median(theirs.spent) / statistics.median(mine.spent)
    apart = max(
        abs(a - b)
        for m, t in zip(mine.first, theirs.first, strict=True)
        for a, b in zip(m["losses"], t["losses"], strict=True)
    )
    cells = [
        str(stage),
        f"{1 / one:.2f}",
        f"{1 / other:.2f}",
        f"{ratio:.2f}",
        f"{best:.2f}",
        f"{spent:.2f}",
        "met" if ratio >= GOAL else "missed",
        *(f"{pair.peak / 1e6:.0f} MB" for pair in (mine, theirs)),
        *(f"{pair.resident / 1e6:.0f} MB" for pair in (mine, theirs)),
        f"{apart:.1e}",
    ]
    return f"| {' | '.join(cells)} |"


def table(rows: list[str], args: argparse.Namespace) -> str:
    adam = "torch's Adam for DeepSpeed" if args.torch_adam else "DeepSpeed's own Adam, in C++"
    setting = f"Two ranks over gloo, an unlimited link, fp32; a GPT of 20.5 M parameters, {ROWS} sequences of {LENGTH} tokens on each rank; {adam}."
    both = [f"{what}, {name}" for what in ("allocated", "process") for name in ("zgraph", "DeepSpeed")]
    ratios = ["ratio", "ratio of the best steps", "ratio of processor time", f"goal {GOAL}"]
    header = ["ZeRO stage", "steps/s, zgraph", "steps/s, DeepSpeed", *ratios, *both, "losses differ by"]
    notes = (
        f"Ratios are DeepSpeed's time by zgraph's, medians of {args.rounds} rounds of {args.steps} steps. Allocated is what torch's allocator holds "
        "at most in a step; the process is all that it has in memory then, with what it has loaded and compiled.",
        f"Conditions: {machine.conditions()}; DeepSpeed {importlib.metadata.version('deepspeed')}; one thread and one core a rank. "
        f"Load average over 5 minutes at the end: {os.getloadavg()[1]:.1f}; where it is above the number of cores, only processor time says much.",
    )
    lines = [f"| {' | '.join(header)} |", f"|{'---:|' * len(header)}", *rows]
    return "\n\n".join(["# DeepSpeed's front door beside DeepSpeed", setting, "\n".join(lines), *notes]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default="0,1,2,3")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--torch-adam", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_of(*json.loads(args.rank))
        return
    rows = []
    args.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="beside_deepspeed"))
    for stage in map(int, args.stages.split(",")):
        rows.append(row_of(stage, measured(stage, args, folder)))
        print(rows[-1], flush=True)
        (args.out / "beside_deepspeed.md").write_text(table(rows, args))  # (as far as it is: a stage takes minutes)


if __name__ == "__main__":
    main()

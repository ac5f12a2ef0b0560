"""Training with everything on disk: numbers, memory, traffic and rate beside the same run in memory and the bare disk.

    python benchmarks/offload.py [--folder DIR] [--layers 24] [--dim 544] [--seq 512] [--steps 5] [--out FOLDER]

One process and no process group, one thread a core. Parameters, gradients, optimizer state (AdamW, clipping) and activations lie in a
file in `--folder` (of the current file system by default). Each case runs in a process of its own, which counts all that torch's CPU
allocator holds from before the model is made (`zgraph.runtime.allocations`).

*example*: the model of examples/train_lm.py, eager and Inductor: losses bit for bit those in memory, measured peaks, and bytes moved a
step beside those that the plan says.

*four times*: a GPT of 90 M parameters under a `memory_budget` of a quarter of its weights, gradients and optimizer state.

*rate*: that model's update, which waits for the disk: bytes a second beside what bare threads read and write with O_DIRECT, in the
same pieces and proportion, before and after, in the same run.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import machine

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]
RESULTS = HERE / "results"
WHAT = ("activations", "optimizer", "parameters")
GOALS = {"peak": 0.35, "traffic": 0.05, "rate": 0.85}
PIECE = 8 * 2**20
COLUMNS = (
    "model",
    "losses",
    "peak in memory",
    "on disk",
    f"ratio (goal {GOALS['peak']})",
    "forecast",
    "read a step",
    f"of the plan's (goal {GOALS['traffic']:.0%})",
    "written a step",
    "of the plan's",
    "step in memory",
    "on disk",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("build"))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--dim", type=int, default=544)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        case, *rest = args.case.split(",")
        print(json.dumps({"example": example, "gpt": gpt_case}[case](args, *rest)))
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = {
            backend: {where: run(args, folder, f"example,{backend},{where}") for where in ("memory", "disk")}
            for backend in ("eager", "inductor")
        }
        found["gpt"] = {where: run(args, folder, f"gpt,{where}") for where in ("memory", "disk")}
    text = report(found, args)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "offload.md").write_text(text)
    print(text)


def run(args: argparse.Namespace, folder: str, case: str) -> Any:
    sizes = [f"--layers={args.layers}", f"--dim={args.dim}", f"--seq={args.seq}", f"--steps={args.steps}"]
    command = [sys.executable, __file__, "--folder", folder, *sizes, "--case", case]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    print(case, done.stdout.splitlines()[-1][:300], file=sys.stderr, flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def offload(args: argparse.Namespace, where: str) -> dict[str, Any]:
    return {"offload": dict.fromkeys(WHAT, f"nvme:{args.folder}")} if where == "disk" else {}


# -- cases --------------------------------------------------------------------------------------------------------------------
def example(args: argparse.Namespace, backend: str, where: str) -> dict[str, Any]:
    from zgraph.runtime import allocations

    allocations.count()
    import train_lm

    import zgraph

    model, _ = train_lm.factory()
    plan = {"zero": 3, "backend": backend, "optimizer": zgraph.AdamW(lr=3e-3), "grad_clip": 1.0, **offload(args, where)}
    model = zgraph.compile(model, zgraph.Plan(**plan))
    text = train_lm.Text.load()
    batches = [text.batch(seed=0, step=s, batch=8, seq=128, ranks=train_lm.Ranks()) for s in range(20)]
    return steps(model, [{"tokens": x, "targets": y} for x, y in batches])


def gpt_case(args: argparse.Namespace, where: str) -> dict[str, Any]:
    from zgraph.runtime import allocations

    allocations.count()
    import torch
    from link import gpt

    import zgraph

    torch.set_num_threads(os.cpu_count() or 1)
    size = gpt.Size(args.layers, args.dim, 8192, args.seq, 1, args.seq)
    model = gpt.make(size)
    whole = 4 * sum(p.nbytes for p in model.parameters())
    budget = {"memory_budget": whole // 4} if where == "disk" else {}
    plan = {"zero": 3, "optimizer": zgraph.AdamW(lr=1e-4), "grad_clip": 1.0, **budget, **offload(args, where)}
    model = zgraph.compile(model, zgraph.Plan(**plan))
    batch = gpt.data(size, 0)
    bare = Raw(args.folder) if where == "disk" else None
    found = steps(model, [batch] * (2 + args.steps), bare)
    return found | {"whole": whole, "budget": whole // 4, "parameters": whole // 16}


def steps(model: Any, batches: list[Any], bare: Raw | None = None) -> dict[str, Any]:
    """Train on these batches: losses, the measured and the forecast peak, what a step moved and was to move, and what the `bare`
    disk did before and after each update."""
    from zgraph.passes.analysis.live_memory import memory_of
    from zgraph.passes.analysis.simulator import simulate

    runtime = model.zgraph.runtime
    losses, moved, seconds, updates = [], [], [], []
    beside = [bare.round()] if bare else []
    for batch in batches:
        before, begin = runtime.tiers.moved_bytes(), time.perf_counter()
        out = model.train_step(**batch) if isinstance(batch, dict) else model.train_step(*batch)
        losses.append(float(getattr(out, "loss", out)))
        seconds.append(time.perf_counter() - begin)
        moved.append([b - a for a, b in zip(before, runtime.tiers.moved_bytes(), strict=True)])
        runtime.clock.read()
        updates.append(runtime.clock.steps[-1]["update"])
        if bare:
            beside.append(bare.round())
    programs = [s.program().history().program for s in runtime.entries.values()]
    update = [h.program for h in runtime.updater.programs.histories().values()]
    made = [simulate(p, runtime.costs) for p in (*programs, *update)]
    planned = [sum(f.moved.get(f"nvme {way}", 0) for f in made) for way in ("read", "write")]
    of_update = [sum(simulate(p, runtime.costs).moved.get(f"nvme {w}", 0) for p in update) for w in ("read", "write")]
    peak = max(sum(at.values()) for p in (*programs, *update) for at in memory_of(p, runtime.costs.fused))
    return {
        "losses": losses,
        "peak": runtime.memory.measured,
        "forecast": peak,
        "moved": moved[-1],
        "planned": planned,
        "of_update": of_update,
        "seconds": statistics.median(seconds[2:]),
        "update": statistics.median(updates[2:]),
        "raw": {way: statistics.median(b[way] for b in beside[2:]) for way in ("read", "write")} if bare else {},
        "rates": [
            sum(n / ((a[way] + b[way]) / 2) for n, way in zip(of_update, ("read", "write"), strict=True)) / seconds
            for seconds, a, b in list(zip(updates, beside, beside[1:], strict=False))[2:]
        ],
    }


class Raw:
    """Bare threads that write and read with O_DIRECT, from and into memory that is used again."""

    def __init__(self, folder: Path, nbytes: int = 512 * 2**20, threads: int = 4) -> None:
        self.nbytes = nbytes
        self.fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT)
        self.memory = [mmap.mmap(-1, PIECE) for _ in range(threads)]
        for buffer in self.memory:
            buffer.write(os.urandom(PIECE))
        self._each(os.pwritev)  # (blocks that are there are written faster)

    def round(self) -> dict[str, float]:
        """Bytes a second."""
        return {"write": self._each(os.pwritev), "read": self._each(os.preadv)}

    def _each(self, way: Any) -> float:
        threads = len(self.memory)

        def lane(number: int) -> None:
            for at in range(number * PIECE, self.nbytes, threads * PIECE):
                way(self.fd, [self.memory[number]], at)

        begin = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lane, range(threads)))
        return self.nbytes / (time.perf_counter() - begin)


# -- the report ---------------------------------------------------------------------------------------------------------------
def report(found: dict[str, Any], args: argparse.Namespace) -> str:
    lines = [
        "# Offloading",
        "",
        f"{machine.conditions()}, "
        f"`python benchmarks/offload.py --layers {args.layers} --dim {args.dim} --seq {args.seq} --steps {args.steps}`; a shared and noisy machine.",
        "",
        "Everything on disk beside everything in memory: AdamW with clipping, one process.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * len(COLUMNS)}",
    ]
    rows = {
        "example, eager": found["eager"],
        "example, Inductor": found["inductor"],
        "GPT under its budget": found["gpt"],
    }
    for name, both in rows.items():
        one, other = both["memory"], both["disk"]
        same = one["losses"] == other["losses"]
        far = max(abs(a - b) / abs(a) for a, b in zip(one["losses"], other["losses"], strict=True))
        cells = [
            name,
            "equal, bit for bit" if same else f"within {far:.1e}",
            mb(one["peak"]),
            mb(other["peak"]),
            f"{other['peak'] / one['peak']:.3f}",
            f"{mb(other['forecast'])} ({other['forecast'] / other['peak'] - 1:+.1%})",
            mb(other["moved"][0]),
            f"{other['moved'][0] / other['planned'][0] - 1:+.1%}",
            mb(other["moved"][1]),
            f"{other['moved'][1] / other['planned'][1] - 1:+.1%}",
            f"{one['seconds']:.3f} s",
            f"{other['seconds']:.3f} s ({other['seconds'] / one['seconds']:.2f})",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    disk, plain = found["gpt"]["disk"], found["gpt"]["memory"]
    read, written = disk["of_update"]
    lines += [
        "",
        f"The GPT has {disk['parameters'] / 1e6:.0f} M parameters: weights, gradients and optimizer state are {mb(disk['whole'])},",
        f"its budget {mb(disk['budget'])}, its measured peak {mb(disk['peak'])} ({disk['peak'] / disk['budget']:.3f} of the budget).",
        "",
        f"Its update reads {mb(read)} and writes {mb(written)} in {disk['update']:.3f} s (in memory {plain['update']:.3f} s). Bare threads,",
        f"before and after each, read {disk['raw']['read'] / 1e9:.2f} GB/s and write {disk['raw']['write'] / 1e9:.2f} GB/s (medians).",
        f"Updates have **{statistics.median(disk['rates']):.2f}** of their rate (goal {GOALS['rate']}; {min(disk['rates']):.2f} to "
        f"{max(disk['rates']):.2f}).",
    ]
    return "\n".join(lines) + "\n"


def mb(size: float) -> str:
    return f"{size / 1e6:.1f} MB"


if __name__ == "__main__":
    main()

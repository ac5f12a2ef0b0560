"""Context parallelism, counted: the memory of a long sequence on several ranks, forecast and measured.

    python benchmarks/context_parallel.py [--long 32768] [--short 4096] [--layers 4] [--width 256] [--out FOLDER]

A GPT, forward and backward, its loss alone. What is compared is the most that a rank holds beyond its weights and their gradients, which are
whole on each: it should fall as one over the ranks. The long sequence is forecast only (one process, nothing allocated); the short
one is run as well, on ranks over gloo, and the bytes that torch's allocator holds are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import machine
from tensor_parallel import model_of

RESULTS = Path(__file__).parent / "results"
RANKS = (1, 2, 4)
WAYS = ("heads", "ring")
SLACK = 1.1  # how much more than one over the ranks is still called that: lengths, scalars, what a collective takes and gives


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", type=int, default=32768)
    parser.add_argument("--short", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    import torch.multiprocessing as mp

    rows: list[dict[str, Any]] = []
    for ranks in RANKS:
        for way in WAYS if ranks > 1 else ("heads",):
            folder = Path(tempfile.mkdtemp(prefix="context_parallel"))
            try:
                mp.spawn(measured, args=(ranks, way, options, str(folder)), nprocs=ranks)
                found = [json.loads(p.read_text()) for p in folder.glob("rank*.json")]
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            row = {
                "ranks": ranks,
                "way": way if ranks > 1 else "",
                "long": forecast(ranks, way, options.long, options),
                "short": forecast(ranks, way, options.short, options),
                "measured": max(f["peak"] for f in found),
                "loss": found[0]["loss"],
            }
            rows.append(row)
            print(row, flush=True)
    assert max(abs(r["loss"] - rows[0]["loss"]) for r in rows) < 1e-4 * rows[0]["loss"]
    text = table(rows, options)
    print(text)
    (options.out / "context_parallel.md").parent.mkdir(parents=True, exist_ok=True)
    (options.out / "context_parallel.md").write_text(text)


def plan_of(ranks: int, way: str) -> Any:
    import zgraph

    fields = {"context_attention": way} if ranks > 1 else {}
    return zgraph.Plan(mesh={"cp": ranks}, zero=0, backend="eager", **fields)


def forecast(ranks: int, way: str, length: int, options: argparse.Namespace) -> float:
    """Bytes at the peak, beyond weights and gradients, of a sequence of so many tokens."""
    import torch

    from zgraph.build.planned_step import programs
    from zgraph.passes.analysis.costs import Costs, hardware
    from zgraph.passes.analysis.simulator import simulate

    model = model_of(options)
    words = torch.randint(options.vocabulary, (1, length))
    history = programs(model, plan_of(ranks, way), (words, words), ranks)
    found = simulate(history.program, Costs(hardware("cpu"), fused=False))
    return sum(found.peak.values()) - 2 * sum(p.numel() * p.element_size() for p in model.parameters())


def measured(rank: int, ranks: int, way: str, options: argparse.Namespace, folder: str) -> None:
    import torch
    import torch.distributed as dist

    import zgraph
    from zgraph.runtime import allocations

    torch.set_num_threads(1)
    allocations.count()
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    model = zgraph.compile(model_of(options), plan_of(ranks, way))
    torch.manual_seed(1)
    words, targets = (torch.randint(options.vocabulary, (1, options.short)) for _ in range(2))
    model(words, targets).backward()
    model.zero_grad()
    before = allocations.live()
    allocations.reset_peak()
    loss = model(words, targets)
    loss.backward()
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    found = {"peak": allocations.peak() - before - gradients, "loss": loss.item()}
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(found))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def table(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    weights = sum(p.numel() for p in model_of(options).parameters())
    lines = [
        "# Memory of long sequences",
        "",
        f"A GPT of {options.layers} layers of width {options.width}, {options.vocabulary} words, {weights / 1e6:.1f} M parameters; one sequence, "
        "forward and backward, float32, eager. The most that a rank holds beyond weights and gradients.",
        "",
        f"| ranks of cp | attention | {options.long} tokens, forecast | x ranks "
        f"| {options.short} tokens, forecast | x ranks | measured | x ranks | |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    first = rows[0]
    for row in rows:
        parts = [row[key] * row["ranks"] / first[key] for key in ("long", "short", "measured")]
        sizes = [f"{row[key] / 2**20:.1f} MiB" for key in ("long", "short", "measured")]
        cells = " | ".join(f"{size} | {part:.3f}" for size, part in zip(sizes, parts, strict=True))
        said = "" if row is first else "met" if max(parts) <= SLACK else "missed"
        lines.append(f"| {row['ranks']} | {row['way']} | {cells} | {said} |")
    goal = f'Goal: memory falls as one over the ranks; "x ranks" is what a rank holds, times the ranks, of what one rank holds: at most {SLACK}.'
    return "\n".join([*lines, "", goal, "", f"Conditions: {machine.conditions()}, one thread a rank.", ""])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

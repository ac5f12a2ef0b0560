"""Random batches of 1 to 8 rows, 3 to 200 long, for models of transformers: losses and gradients beside plain PyTorch's.

    python tests/support/lengths_campaign.py llama t5 --batches 200 --ranks 1 2 --zero 0 3

(That of images and words has 2 or 3 images of any size.)
Each rank has other sizes in each step; plain PyTorch computes all of them in one process.
A row of docs/features/lengths.md's table is printed for each run; `--write` puts it into benchmarks/results/lengths.md as well, in place of the
one of such a run before.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import datetime
import gc
import itertools
import random
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

HERE = Path(__file__).parent
sys.path[:0] = [
    p for p in (str(HERE), str(HERE.parent / "runtime"), str(HERE.parents[1] / "benchmarks")) if p not in sys.path
]

import machine  # noqa: E402

import zgraph  # noqa: E402

RESULT = HERE.parent.parent / "benchmarks" / "results" / "lengths.md"
HEADING = "## Random batches"
COLUMNS = "| model | ranks | ZeRO | backend | batches | loss | gradient | training programs | grown by | when, at which commit |"
# oneDNN keeps what it makes for each shape of a product, up to 1,024 shapes, also for plain PyTorch: a process grows by it until then.
NO_SHAPES_KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1"}
MODELS = ("llama", "gpt2", "bert", "t5", "vit", "whisper", "qwen2_vl")
TOLERANCE = {
    "eager": 2e-6,
    "inductor": 5e-6,
}  # of a gradient, over its norm and a little of all together: float32 rounding


@dataclass(frozen=True)
class Outcome:
    """The largest differences, relative; the programs for training; and the bytes that the process took more after the last batch than half way."""

    loss: float
    gradient: float
    programs: tuple[str, ...]
    grown: int
    ones: int  # batches with a size of 1 on some rank


def _bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # (what is free within the process is no growth)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _sizes(name: str, number: int, rank: int) -> tuple[int, int]:
    draw = random.Random(f"{name} {number} {rank}")
    if name == "qwen2_vl":  # (each number of images is a program of its own)
        return draw.randint(2, 3), draw.randint(38, 200)
    return draw.randint(1, 8), draw.randint(3, 200)


def _call(name: str, plain: nn.Module, rows: int, length: int) -> dict[str, object]:
    from test_lengths import _batch, images_and_words

    return images_and_words(plain, length, _images(rows, length)) if name == "qwen2_vl" else _batch(name, rows, length)


def _images(rows: int, length: int) -> list[tuple[int, int]]:
    """Heights and widths in patches, four of which are a word of the row."""
    draw = random.Random(f"{rows} {length}")
    return [(2 * draw.randint(2, 6), 2 * draw.randint(2, 6)) for _ in range(rows)]


def run(name: str, zero: int, backend: str, batches: int) -> Outcome:
    """Run the campaign for one model on this rank; of all ranks each must call it."""
    from test_lengths import _model

    warnings.filterwarnings("ignore")
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    here = dist.get_rank() if dist.is_initialized() else 0
    plain: nn.Module = _model(name)
    model = zgraph.compile(copy.deepcopy(plain), zgraph.Plan(backend=backend, zero=zero))
    worst_loss = worst = 0.0
    ones = half = 0
    for number in range(batches):
        sizes = [_sizes(name, number, rank) for rank in range(ranks)]
        ones += any(1 in size for size in sizes)
        mine = model(**_call(name, plain, *sizes[here])).loss
        mine.backward()
        for rank, size in enumerate(sizes):
            theirs = plain(**_call(name, plain, *size)).loss
            (theirs / ranks).backward()
            if rank == here:
                worst_loss = max(worst_loss, float((mine - theirs).detach().abs() / theirs.detach().abs()))
        worst = max(worst, _difference(model, plain))
        model.zero_grad()
        plain.zero_grad()
        if number == batches // 2:
            half = _bytes()
    return Outcome(worst_loss, worst, tuple(model.zgraph.programs), _bytes() - half, ones)


def _difference(model: nn.Module, plain: nn.Module) -> float:
    """As `test_lengths.difference` has it: over each gradient's norm and a little of all together."""
    pairs = [
        (a.grad.full_tensor() if hasattr(a.grad, "full_tensor") else a.grad, b.grad)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
        if b.grad is not None
    ]
    every = float(torch.stack([b.norm() for _, b in pairs]).norm())
    return max(float((a - b).norm()) / (float(b.norm()) + 0.03 * every) for a, b in pairs)


def recorded(text: str, row: str) -> str:
    """The text of the results' page with this row, in place of that of a run of the same model, ranks, ZeRO stage and backend."""
    before, _, below = text.partition(HEADING)
    run = row.split("|")[:5]
    rows = [line for line in below.splitlines() if line.startswith("| ") and line.split("|")[:5] != run]
    rows = sorted({*rows, row} - {COLUMNS})
    told = (
        "Each line is of `python tests/support/lengths_campaign.py MODEL --batches N --ranks R --zero Z --backend B --write`: the largest relative "
        "differences from plain PyTorch, and what a process grew by from the middle of the run to its end."
    )
    return "\n".join([before.rstrip(), "", HEADING, "", told, "", COLUMNS, "|" + "---|" * 10, *rows, ""])


def main() -> None:
    from ranks import Ranks

    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1])
    parser.add_argument("--zero", type=int, nargs="*", default=[0])
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    asked = parser.parse_args()
    print(COLUMNS, flush=True)
    for name, number, zero in itertools.product(asked.models, asked.ranks, asked.zero):
        import lengths_campaign  # (ranks find it by its name)

        with Ranks(number, env=NO_SHAPES_KEPT) as ranks:
            every = ranks.run(lengths_campaign.run, name, zero, asked.backend, asked.batches, limit=7200)
        loss, gradient, grown = (max(getattr(f, what) for f in every) for what in ("loss", "gradient", "grown"))
        programs = len(every[0].programs)
        numbers = f"{loss:.0e} | {gradient:.0e} | {programs} | {grown / 1e6:.1f} MB | {datetime.date.today()}, {machine.commit()}"
        row = f"| {name} | {number} | {zero} | {asked.backend} | {asked.batches} | {numbers} |"
        print(row, flush=True)
        if asked.write:
            RESULT.write_text(recorded(RESULT.read_text(), row))


if __name__ == "__main__":
    main()

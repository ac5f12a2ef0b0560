"""Sparse attention beside whole attention, forward and backward, on one thread: CPU time and peak memory by length and density.

    python benchmarks/sparse_attention.py --lengths 2048 8192 --write benchmarks/results/sparse_attention.md

Whole attention is torch's scaled_dot_product_attention, without a mask, and once with one that shows a window of about half of the blocks. Sparse
attention is the operator that a plan's `attention` puts in its place, with sliding windows (blocks side by side) and BigBird's layouts (blocks
apart). Rounds alternate between all rows; the median is shown, and its ratio to whole attention. A peak is of all tensors at once, queries,
keys, values and their gradients among them; what a run adds to those that are there before it stands beside. With `--flex` compiled flex
attention stands beside them, forward alone (torch has no backward of it on a CPU).
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from torch.nn import functional as F

import zgraph
from zgraph.plan.attention import Sparsity
from zgraph.program.sparse_attention import SPARSE, SPARSE_BACKWARD, counted_blocks
from zgraph.runtime import allocations

HEADS, WIDTH, BLOCK = 4, 64, 64


def layouts(length: int) -> dict[str, Sparsity]:
    blocks = length // BLOCK
    windows = {
        f"window, 1/{part}": zgraph.LocalWindow(
            block=BLOCK, num_sliding_window_blocks=blocks // part | 1, attention="bidirectional"
        )
        for part in (16, 8, 4)
    }
    return {
        **windows,
        "window, about 1/2": zgraph.LocalWindow(
            block=BLOCK, num_sliding_window_blocks=blocks * 5 // 8 | 1, attention="bidirectional"
        ),
        "BigBird": zgraph.BigBird(block=BLOCK, num_random_blocks=3, num_sliding_window_blocks=3, num_global_blocks=2),
    }


def measured(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median CPU seconds of each run."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for at in range(rounds + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if at:
                seconds[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def peak_of(run: Callable[[], object]) -> tuple[int, int]:
    """Return (the bytes of all tensors at a run's peak, those that the run adds to what is there before it)."""
    before = allocations.live()
    allocations.reset_peak()
    run()
    return allocations.peak(), allocations.peak() - before


def rows_of(length: int, rounds: int, *, flex: bool) -> list[str]:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, HEADS, length, WIDTH, requires_grad=True) for _ in range(3))
    tangent = torch.randn_like(query)

    def whole(mask: torch.Tensor | None = None) -> None:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        torch.autograd.grad(out, (query, key, value), tangent)

    def with_mask() -> None:
        places = torch.arange(length) // BLOCK
        whole((places - places.unsqueeze(1)).abs() <= length // BLOCK // 4)

    def sparse(text: str) -> Callable[[], object]:
        given = [x.detach() for x in (query, key, value)]

        def run() -> object:
            results = SPARSE(*given, None, False, None, text)
            return SPARSE_BACKWARD(tangent, *given, *results, None, False, None, text)

        return run

    each = layouts(length)
    runs: dict[str, Callable[[], object]] = {
        "whole": whole,
        "whole, with a mask": with_mask,
        **{name: sparse(s.model_dump_json()) for name, s in each.items()},
    }
    seconds, peaks = measured(runs, rounds), {name: peak_of(run) for name, run in runs.items()}
    lines = []
    for name in runs:
        share = "1"
        if name in each:
            computed, blocks = counted_blocks(each[name].model_dump_json(), HEADS, length)
            share = f"{computed / blocks:.3f}"
        ratio, (peak, added) = seconds[name] / seconds["whole"], peaks[name]
        lines.append(
            f"| {length:,} | {name} | {share} | {seconds[name] * 1e3:,.0f} | {ratio:.3f} | {peak / 2**20:,.1f} | {added / 2**20:,.1f} |"
        )
    if flex:
        lines += _beside_flex(length, rounds, (query, key, value), each["window, 1/8"])
    return lines


def _beside_flex(length: int, rounds: int, inputs: tuple[torch.Tensor, ...], window: Sparsity) -> list[str]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    reach = window.num_sliding_window_blocks // 2  # type: ignore[attr-defined]
    mask = create_block_mask(
        lambda b, h, q, k: (q // BLOCK - k // BLOCK).abs() <= reach,
        None,
        None,
        length,
        length,
        device="cpu",
        BLOCK_SIZE=BLOCK,
    )
    given, compiled, text = [x.detach() for x in inputs], torch.compile(flex_attention), window.model_dump_json()
    runs: dict[str, Callable[[], object]] = {
        "flex": lambda: compiled(*given, block_mask=mask),
        "ours": lambda: SPARSE(*given, None, False, None, text),
    }
    seconds = measured(runs, rounds)
    return [
        f"| {length:,} | window, 1/8, forward alone, flex attention | | {seconds['flex'] * 1e3:,.0f} | | | |",
        f"| {length:,} | window, 1/8, forward alone | | {seconds['ours'] * 1e3:,.0f} | {seconds['ours'] / seconds['flex']:.3f} of flex | | |",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--flex", action="store_true", help="compiled flex attention beside it, forward alone")
    parser.add_argument("--write", type=Path, help="a file for the table")
    given = parser.parse_args()
    torch.set_num_threads(1)
    allocations.count()
    head = [
        f"{date.today()}, {platform.processor() or platform.machine()}, one thread, torch {torch.__version__}, float32, {HEADS} heads of width "
        f"{WIDTH}, blocks of {BLOCK} x {BLOCK}, medians of {given.rounds} rounds, load {os.getloadavg()[0]:.1f}. Forward and backward.",
        "",
        "| length | attention | share of blocks | ms of CPU | of whole attention | peak, MiB | added, MiB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    text = "\n".join([*head, *(line for n in given.lengths for line in rows_of(n, given.rounds, flex=given.flex))])
    print(text)
    if given.write:
        given.write.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

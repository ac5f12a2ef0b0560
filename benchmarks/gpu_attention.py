"""Sparse attention on one device, for `gpu.py`: its kernels beside whole attention with a mask, in float64, and their time beside whole attention.

    python benchmarks/gpu_attention.py --lengths 2048 8192

prints what the kernels compute and move beside what is needed: counted from their lists of tiles, so it needs no device.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from gpu_models import Difference, difference
from link.one_gpu import measure
from torch.nn import functional as F

import zgraph
from zgraph.codegen.kernels.attention_tiles import tiles_of
from zgraph.plan.attention import Sparsity
from zgraph.program.sparse_attention import SPARSE, SPARSE_BACKWARD
from zgraph.verification.masked_attention import layout_mask

# The norm of an error over that of the result: a product of float32 is about one of TF32 in three parts.
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
TILE = 64  # of the kernels, for heads of 64 numbers in half precision
WIDTHS = (32, 64, 80, 128, 256)


def not_far(batch, head, query, key):
    return (query - key).abs() < 200


def layouts(length: int, block: int) -> dict[str, Sparsity]:
    part = length // block // 8 | 1
    return {
        f"window, blocks of {block}": zgraph.LocalWindow(block=block, num_sliding_window_blocks=part),
        f"BigBird, blocks of {block}": zgraph.BigBird(block=block, num_random_blocks=3, num_global_blocks=2),
    }


def given(
    heads: int, of_keys: int, length: int, width: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    shapes = [(2, n, length, width) for n in (heads, of_keys, of_keys, heads)]
    return [torch.randn(shape, generator=made).to(device, dtype) for shape in shapes]


def check(sparsity: Sparsity, width: int, dtype: torch.dtype, length: int, device: torch.device) -> tuple[bool, str]:
    """Return whether results and gradients are those of whole attention in float64, and the same bits twice."""
    query, key, value, tangent = given(4, 2, length, width, dtype, device)
    options = (None, True, None, sparsity.model_dump_json())
    runs: list[dict[str, torch.Tensor]] = []
    for _ in range(2):
        out, sums = SPARSE(query, key, value, *options)
        grads = SPARSE_BACKWARD(tangent, query, key, value, out, sums, *options)
        runs.append(dict(zip(("out", "query", "key", "value"), (out, *grads), strict=True)))
    exact = [x.double().requires_grad_() for x in (query, key, value)]
    shown = layout_mask(sparsity, 4, length) & torch.ones(length, length, dtype=torch.bool).tril()
    seen = shown.any(-1, keepdim=True).to(device)
    whole = F.scaled_dot_product_attention(*exact, attn_mask=shown.to(device), enable_gqa=True).where(seen, 0.0)
    right = [whole.detach(), *torch.autograd.grad(whole, exact, tangent.double())]
    found: Difference = difference(runs[0], dict(zip(runs[0], right, strict=True)), BOUNDS[dtype])
    same = all(torch.equal(x, runs[1][name]) for name, x in runs[0].items())
    return found.within and same, str(found) + ("" if same else "; not the same bits twice")


def check_all(results: Any, device: torch.device, length: int) -> None:
    """Each width and dtype that the kernels serve, with blocks that are smaller and larger than a tile."""
    function = zgraph.MaskFunction(function=f"{__name__}:not_far", block=128)
    for dtype in BOUNDS:
        for width in WIDTHS:
            for name, sparsity in {**layouts(length, 16), **layouts(length, 128), "function": function}.items():
                what = f"sparse attention, {name}, heads of {width}, {dtype}"
                with results.attempt(what):
                    results.check(what, *check(sparsity, width, dtype, length, device))


def measure_all(results: Any, device: torch.device, lengths: tuple[int, ...], repeat: int) -> None:
    """Forward and backward in bfloat16, causal, beside torch's whole attention."""
    for length in lengths:
        query, key, value, tangent = given(16, 16, length, 64, torch.bfloat16, device)
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]

        def whole(leaves: Any = leaves, tangent: Any = tangent) -> None:
            torch.autograd.grad(F.scaled_dot_product_attention(*leaves, is_causal=True), leaves, tangent)

        rows: dict[str, tuple[Callable[[], Any], Sparsity]] = {"whole": (whole, zgraph.Dense(block=64))}
        for name, sparsity in {**layouts(length, 16), **layouts(length, 64)}.items():

            def sparse(
                text: str = sparsity.model_dump_json(), x: Any = (query, key, value), tangent: Any = tangent
            ) -> None:
                out = SPARSE(*x, None, True, None, text)
                SPARSE_BACKWARD(tangent, *x, *out, None, True, None, text)

            rows[name] = (sparse, sparsity)
        for name, (run, sparsity) in rows.items():
            with results.attempt(f"time of {name} at {length:,}"):
                median, _, peak = measure(run, device, repeat)
                counts = counted(sparsity, length, 64, 2)
                done = 2 * 16 * counts["needed operations"] / median / 1e9
                shown = (
                    f"{counts['tiles']:,} of {(length // TILE) ** 2:,}",
                    f"{median:.2f} ms",
                    f"{peak:.2f} GiB",
                    f"{done:.0f}",
                )
                results.attention.append((f"{length:,}, {name}", *shown))


# -- counts -----------------------------------------------------------------------------------------------------------
def counted(sparsity: Sparsity, length: int, width: int, size: int) -> dict[str, int]:
    """Return what the kernels compute and move for one causal head, by their lists of tiles, and what is needed: pairs of positions, operations,
    and bytes, where nothing stays in the cache."""
    tiles = tiles_of(sparsity.model_dump_json(), 1, length, True, TILE, torch.device("cpu"))
    begin, middle, end = tiles.of_rows.bounds[0].unbind(-1)
    count, parts = int((end - begin).sum()), tiles.of_rows.patterns[: int(end[-1])]
    of_bits = torch.tensor([int(x).bit_count() for x in range(256)])
    shown = int((end - middle).sum()) * TILE**2
    shown += sum(int(of_bits[tiles.bits[pattern].long()].sum()) for pattern in parts.tolist() if pattern >= 0)
    row, tile = width * size, TILE * width * size
    return {
        "tiles": count,
        "pairs": shown,
        "computed": count * TILE**2,
        "operations": 18 * count * TILE**2 * width,  # 4 of the forward, 6 and 8 of the backward
        "needed operations": 14 * shown * width,  # 4 of the forward, 10 of the backward
        "bytes": length * (10 * row + 12) + count * (6 * tile + 8 * TILE),
        "needed bytes": length * (12 * row + 8),  # each tensor once in each of the forward and the backward
    }


def table(lengths: list[int]) -> list[str]:
    lines = [
        "| length | layout | positions computed / shown | operations / needed | bytes / needed | bits of tiles |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for length in lengths:
        function = zgraph.MaskFunction(function=f"{__name__}:not_far", block=128)
        for name, sparsity in {
            **layouts(length, 16),
            **layouts(length, 64),
            **layouts(length, 128),
            "function": function,
        }.items():
            counts = counted(sparsity, length, 64, 2)
            tiles = tiles_of(sparsity.model_dump_json(), 1, length, True, TILE, torch.device("cpu"))
            ratios = [
                counts[a] / counts[b]
                for a, b in (("computed", "pairs"), ("operations", "needed operations"), ("bytes", "needed bytes"))
            ]
            cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
            lines.append(f"| {length:,} | {name} | {cells} | {tiles.bits.numel() / 1024:,.1f} KiB |")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    print("\n".join(table(parser.parse_args().lengths)))

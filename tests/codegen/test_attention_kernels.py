"""Triton's kernels of sparse attention: their numbers by the interpreter, code for sm_90, and the tiles that they compute. No GPU is needed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zgraph
from zgraph.codegen.kernels import attention_tiles, refuse_attention
from zgraph.errors import UnsupportedError
from zgraph.plan.attention import PartOfHeads
from zgraph.verification.masked_attention import layout_mask

HERE = Path(__file__).parents[1] / "cuda"
SHARED = 232448  # bytes of shared memory that a program may have on sm_90
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def script(name: str, *args: str, **variables: str) -> Any:
    command = [sys.executable, str(HERE / name), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=os.environ | variables)
    assert done.returncode == 0, f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])


@needs_triton
@pytest.mark.parametrize("count", [pytest.param(150, marks=pytest.mark.slow), 4])
def test_kernels_compute_whole_attention_with_a_mask(count: int) -> None:
    found = script("attention.py", str(count), "0")
    assert found["compared"] == count and not found["wrong"], found["wrong"]
    assert found["empty"] > count, "queries that see no key are among them"
    assert found["dropped"], "dropout is among them"


@needs_triton
@pytest.mark.slow
def test_attention_kernels_compile_for_sm90(tmp_path: Path) -> None:
    widths = ("32", "64", "80", "128", "256")
    found = script("compile_attention.py", *widths, TRITON_CACHE_DIR=str(tmp_path))
    assert len(found) == 3 * 3 * len(widths)
    for (
        name,
        width,
        dtype,
        target,
        size,
        shared,
        *_,
    ) in found:  # (some spill a few registers: those of float32, and of 80 numbers)
        case = (name, width, dtype)
        assert target.startswith(".target sm_90") and size > 0 and shared <= SHARED, case


def function_of_heads(batch, head, query, key):
    return ((query - key).abs() < 9 * (head + 1)) & (query != 40)


HEADS = 3
LAYOUTS = {
    "fixed": zgraph.Fixed(block=8, num_local_blocks=3),
    "bigbird": zgraph.BigBird(block=16, different_layout_per_head=True),
    "longformer": zgraph.Longformer(block=128),
    "empty": zgraph.BlockLayout(block=64, layout=["10000", "00000", "00010", "00011", "11111"]),
    "function": zgraph.MaskFunction(function=f"{__name__}:function_of_heads", block=32),
    "window of positions": zgraph.SlidingWindow(block=32, window=45, ahead=3),
    "heads of a rank": PartOfHeads(
        block=16,
        whole=zgraph.BigBird(block=16, different_layout_per_head=True).model_dump_json(),
        first=HEADS,
        heads=2 * HEADS,
    ),
    "functions of a rank's heads": PartOfHeads(
        block=32,
        whole=zgraph.MaskFunction(function=f"{__name__}:function_of_heads", block=32).model_dump_json(),
        first=HEADS,
        heads=2 * HEADS,
    ),
}


def shown_by(tiles: attention_tiles.Tiles, lists: attention_tiles.Lists, side: int) -> torch.Tensor:
    """Return what the lists of tiles show, [heads, lists, others, positions of queries, positions of keys]."""
    shown = torch.zeros(len(tiles.kinds), tiles.count, tiles.count, side, side, dtype=torch.bool)
    bits = (tiles.bits.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).bool().flatten(2)
    for head, kind in enumerate(tiles.kinds.tolist()):
        for at, (begin, middle, end) in enumerate(lists.bounds[kind].tolist()):
            for each in range(begin, end):
                tile = bits[lists.patterns[each]] if each < middle else torch.ones(side, side, dtype=torch.bool)
                assert not shown[head, at, lists.tiles[each]].any() and tile.any(), (
                    "no tile twice, and none that is empty"
                )
                assert (each >= middle) == bool(tile.all()), "what shows all has no bits"
                shown[head, at, lists.tiles[each]] = tile
    return shown


@pytest.mark.parametrize("length", [300, 64, 7])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("side", [32, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tiles_show_what_the_layout_shows(layout: str, side: int, is_causal: bool, length: int) -> None:
    sparsity = LAYOUTS[layout]
    tiles = attention_tiles.tiles_of(sparsity.model_dump_json(), HEADS, length, is_causal, side, torch.device("cpu"))
    expected = layout_mask(sparsity, HEADS, length).expand(HEADS, -1, -1)
    if is_causal:
        expected = expected & torch.ones(length, length, dtype=torch.bool).tril()
    by_row = shown_by(tiles, tiles.of_rows, side)
    positions = by_row.transpose(2, 3).reshape(HEADS, tiles.count * side, tiles.count * side)
    assert torch.equal(positions[:, :length, :length], expected) and not positions[:, :length, length:].any()
    assert torch.equal(by_row.transpose(1, 2), shown_by(tiles, tiles.of_columns, side))


def test_equal_tiles_have_their_bits_once() -> None:
    """A window is the same at each position: two patterns beside the diagonal and on it, and those at the beginning and the end."""
    window = zgraph.LocalWindow(block=16, num_sliding_window_blocks=3).model_dump_json()
    few, many = (
        attention_tiles.tiles_of(window, HEADS, length, True, 64, torch.device("cpu")).bits for length in (320, 3200)
    )
    assert len(few) == len(many) <= 3


def test_what_the_kernels_do_not_serve_is_refused_by_name() -> None:
    x = torch.randn(1, 6, 8, 32)
    refuse_attention(x, x[:, :2], x[:, :2])
    for given, said in (
        ([x.double()] * 3, "of torch.float64"),
        ([torch.randn(1, 1, 8, 257)] * 3, "with heads of 257 numbers"),
        ([x, x[:, :4], x[:, :4]], "of 6 heads with 4 heads of keys"),
        ([x, x[:, :, :5], x[:, :, :5]], r"with keys \[1, 6, 5, 32\]"),
        ([x, x, x[..., :16]], r"and values \[1, 6, 8, 16\]"),
    ):
        with pytest.raises(UnsupportedError, match=said):
            refuse_attention(*given)


def test_cuda_devices_have_the_operators() -> None:
    for name in ("sparse_attention", "sparse_attention_backward"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"zgraph::{name}", "CUDA")

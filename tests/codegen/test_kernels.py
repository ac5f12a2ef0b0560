"""Triton's kernels for numbers in few bits: the bits that torch's operators give, by the interpreter, and code for sm_90. No GPU is needed."""

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

from zgraph.codegen.kernels import MOST_BLOCK, served

HERE = Path(__file__).parents[1] / "cuda"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def script(name: str, *args: str, **variables: str) -> Any:
    command = [sys.executable, str(HERE / name), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, env=os.environ | variables)
    assert done.returncode == 0, f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])


@needs_triton
@pytest.mark.parametrize("count", [pytest.param(200, marks=pytest.mark.slow), 3])
def test_kernels_give_the_bits_of_torchs_operators(count: int) -> None:
    found = script("blocks.py", str(count), "0")
    assert found["compared"] == count and not found["wrong"], found["wrong"]


@needs_triton
@pytest.mark.slow
def test_kernels_compile_for_sm90(tmp_path: Path) -> None:
    found = script("compile_blocks.py", TRITON_CACHE_DIR=str(tmp_path))
    assert len(found) == 27
    for name, format, dtype, target, size, fused in found:
        assert target.startswith(".target sm_90") and size > 0 and not fused, (name, format, dtype)


def test_what_kernels_do_not_serve_is_left_to_torchs_operators() -> None:
    assert served("int8", 256, torch.float32) and served("int4", 10, torch.bfloat16)
    assert not served("int4", 9, torch.float32), "two blocks share a byte"
    assert not served("bf16", 256, torch.float32) and not served("int8", MOST_BLOCK + 1, torch.float32)
    assert not served("int8", 256, torch.float64)

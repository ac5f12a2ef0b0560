"""The benchmarks run, and say what they measured: their figures are no test's business."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=280, cwd=BENCHMARKS.parent
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.inductor
@pytest.mark.slow
def test_gpu_benchmark_has_a_dry_run_on_cpu(tmp_path: Path) -> None:
    file = tmp_path / "gpu.md"
    text = run(
        str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--quick", "--skip", "torch.compile", "--output", str(file)
    )
    written = file.read_text()
    assert written.strip() in text
    assert "a dry run, not a figure" in written and "FAILED" not in written
    assert "| no process group: loss and gradients, backend eager | ok | bit for bit |" in written
    assert "| a mesh of one rank: loss and gradients, backend inductor | ok | at most " in written
    assert "| ten training steps in float32, backend inductor | ok | at most " in written
    assert "| fp16: a step that overflows is skipped | ok | 1 skipped in all |" in written
    assert "| 300 tensors, zgraph |" in written
    assert "zgraph, inductor" in written and "fused kernels in" in written


def test_gpu_benchmark_claims_nothing_without_a_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = subprocess.run([sys.executable, str(BENCHMARKS / "gpu.py")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "no CUDA device" in done.stderr and not done.stdout


def test_compile_time_benchmark_prints_a_table() -> None:
    text = run(str(BENCHMARKS / "compile_time.py"), "--layers", "1", "2")
    rows = [line for line in text.splitlines() if line.startswith(("| 1 ", "| 2 "))]
    assert len(rows) == 2 and all(row.count(" s |") == 7 for row in rows)
    cells = [cell.strip() for cell in rows[1].split("|")]
    assert float(cells[-3]) <= 1.2, "no worse than linear (one layer also carries what all share)"


@pytest.mark.inductor
@pytest.mark.slow
def test_update_benchmark_compares_weights_and_prints_a_table(tmp_path: Path) -> None:
    file = tmp_path / "update.md"
    text = run(
        str(BENCHMARKS / "update.py"), "--parameters", "20000", "--tensors", "3", "--rounds", "1", "--out", str(file)
    )
    names = ("torch fused", "torch foreach", "zgraph", "torch fused + separate", "zgraph, everything")
    for name in names:
        assert f"| {name} |" in text and f"| {name} |" in file.read_text()
    found = re.search(r"afterwards: zgraph: (\S+), zgraph, everything: (\S+)\.", text)
    assert found is not None and max(map(float, found.groups())) < 1e-4

"""Bytes that a step sends, by the option of `wire`: those that the link's backend counts are those of the formats, to the byte."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from wire_bytes import PLAN, model_of_rows

import zgraph
from zgraph.build.planned_step import programs
from zgraph.passes.analysis.parameter_collectives import gathers_of
from zgraph.program.block_quantization import bytes_of

ROOT = Path(__file__).parents[3]
OPTIONS = [
    {},
    {"gather": "bf16", "reduce": "bf16"},
    {"gather": "fp8", "reduce": "fp8"},
    {"gather": "int8"},
    {"reduce": "int4"},
    {"gather": "int8", "reduce": "int4", "rounding": "stochastic", "error_feedback": True},
    {"gather": "int4", "reduce": "int4", "block": 100},
]


def counted(ranks: int, folder: Path) -> list[int]:
    """The link's bytes of a step with each option."""
    fields = json.dumps([{"wire": wire} for wire in OPTIONS])
    script = ROOT / "tests" / "support" / "wire_bytes.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks"), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(ranks), str(folder / "store"), fields],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    done = [process.communicate(timeout=800) for process in running]
    assert all(process.returncode == 0 for process in running), done[0][1][-3000:]
    return json.loads(done[0][0].splitlines()[-1])


def by_formula(wire: dict, ranks: int) -> int:
    plan = zgraph.Plan(**PLAN, wire=wire)
    program = programs(model_of_rows(), plan, (torch.ones(4, 256),), ranks).program
    gathers = [t.name for t in gathers_of(program)]
    total = 0
    for name, spec in program.params.items():
        part = spec.rows * spec.numel // spec.shape[0]  # of a rank, padded
        of = lambda format: 4 * part if format == "same" else bytes_of(part, format, wire.get("block", 256))  # noqa: B023, E731
        sent = gathers.count(name) * of(wire.get("gather", "same")) + of(wire.get("reduce", "same"))
        total += (ranks - 1) * sent
    return total


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the link is compiled by g++")
def test_bytes_that_the_link_counts_are_those_of_the_formats(tmp_path: Path) -> None:
    found = counted(2, tmp_path)
    for wire, sent in zip(OPTIONS, found, strict=True):
        print(f"{sent:,} bytes, {sent / found[0]:.3f} of exact: {wire}")
        assert sent == by_formula(wire, 2), wire

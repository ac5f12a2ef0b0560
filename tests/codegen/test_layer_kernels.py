"""The kernels that Inductor makes of a layer: few, and they move little more than they must. The page of results says so, and stays true."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import nn

import zgraph
from zgraph.build.planned_step import programs
from zgraph.codegen.inductor import compile_inductor
from zgraph.codegen.partition import split

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import kernels

import fake_h200  # isort: skip
import kernel_counts  # isort: skip

PAGE = kernels.RESULT.read_text(encoding="utf-8")
NO_DEVICE = fake_h200.why_not()
pytestmark = pytest.mark.inductor


def the_page_has(rows: list[str]) -> None:
    made_with = f"torch {version('torch')},"
    if made_with not in PAGE:
        pytest.skip(f"the page was not made with {made_with}")
    assert [row for row in rows if row not in PAGE] == []


def test_a_layer_of_llama_moves_little_more_than_it_must_on_sm_90() -> None:
    """At most 1.2 of the least forward and 1.3 backward, by Inductor's count and by zgraph's; the other layers at most
    1.3 by Inductor's."""
    rows = [
        [cell.strip() for cell in line.split("|")]
        for line in PAGE.splitlines()
        if re.match(r"\| \w+ \| \w+ward ", line)
    ]
    assert len(rows) == len(kernels.DEVICES) * len(kernels.LAYERS) * 2
    assert max(float(row[8]) for row in rows) <= 1.3
    (forward, backward) = [row for row in rows if row[1] == "llama"][:2]  # (sm_90 is the first table)
    assert max(map(float, forward[8:10])) <= 1.2
    assert max(map(float, backward[8:10])) <= 1.3


@pytest.mark.slow
def test_the_page_of_results_is_what_is_generated_for_a_llama_layer() -> None:
    pytest.importorskip("transformers")
    the_page_has(kernels.rows({"llama": kernels.measure("llama", "cpu")}))


@pytest.mark.slow
def test_the_page_of_results_is_what_is_generated() -> None:
    pytest.importorskip("transformers")
    devices = [d for d in kernels.DEVICES if d == "cpu" or NO_DEVICE is None]
    counts = {device: kernels.measured(kernels.LAYERS, device) for device in devices}
    for device in devices:
        the_page_has(kernels.rows(counts[device]))
    if NO_DEVICE is not None:
        pytest.skip(f"only for CPUs: {NO_DEVICE}")
    the_page_has(kernels.fusion_rows(counts))


class Small(nn.Module):
    """A norm with its residual, two products, an activation and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)
        self.act, self.dropout = nn.GELU(), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(self.act(self.up(self.norm(x)))))


def test_what_has_to_be_moved_is_counted_by_hand() -> None:
    with torch.device("meta"):
        module, x = Small(), torch.empty(8, 16, 64)
    program = split(programs(module, zgraph.Plan(mesh={"dp": 1}), (x,), 1).program).forward
    least = kernel_counts.least(program)
    tokens, wide, weight = 128 * 64 * 4, 128 * 256 * 4, 64 * 256 * 4
    assert least.library == (tokens + weight + wide) + (wide + weight + tokens)
    small = 2 * 64 * 4  # the norm's weight and bias
    of_loops = tokens + wide + tokens + small  # x, and what the two products give, are read
    of_loops += tokens + wide + tokens  # their operands and the result are written
    assert of_loops <= least.rest <= of_loops + 16, "(a seed is read)"


def test_places_are_the_operators_between_library_calls() -> None:
    with torch.device("meta"):
        module, x = Small(), torch.empty(8, 16, 64)
    program = split(programs(module, zgraph.Plan(mesh={"dp": 1}), (x,), 1).program).forward
    fusions = [fusions for place in kernel_counts.places(program) if (fusions := kernel_counts.fusions_of(place))]
    names = kernel_counts.NORM, kernel_counts.ACTIVATION, kernel_counts.DROPOUT
    assert sorted(fusions, key=str) == sorted(({name} for name in names), key=str), (
        "(the mask is a place without a name)"
    )
    with kernel_counts.generating() as generated:
        compile_inductor(program, {})
    counts = kernel_counts.counts(program, generated)
    assert counts.library == 2
    assert [(f.places, f.kernels, f.refusals) for f in counts.fusions] == [(1, 1, {})] * 3


def test_other_library_calls_than_the_programs_are_refused() -> None:
    """The least would be that of another program."""
    with torch.device("meta"):
        module, x = Small(), torch.empty(8, 16, 64)
    program = split(programs(module, zgraph.Plan(mesh={"dp": 1}), (x,), 1).program).forward
    with pytest.raises(RuntimeError, match=r"forward has library calls \['\w+', '\w+'\], its code \[\]"):
        kernel_counts.counts(program, kernel_counts.Generated())

"""Commands show symbols where a plan declares sizes, and programs at a point with `--at`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zgraph.cli.app import app

PLAN = """
backend = "eager"
mesh = { dp = 2 }

[dynamic.x]
0 = { name = "rows", max = 256, typical = 16 }
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    target = tmp_path / "sized_target.py"
    target.write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)\n"
        "    def forward(self, x):\n"
        "        return self.down(self.up(x).relu()).square().mean()\n"
        "def make():\n    return Net(), (torch.zeros(4, 8),)\n"
    )
    (tmp_path / "plan.toml").write_text(PLAN)
    monkeypatch.chdir(tmp_path)

    def call(command: str, *args: str, ok: bool = True) -> str:
        done = CliRunner().invoke(app, [command, "sized_target:make", "--plan", "plan.toml", *args])
        assert (done.exit_code == 0) is ok, (done.output, done.exception)
        return done.output if ok else done.output + str(done.exception)

    return call


def test_a_dump_shows_symbols_and_numbers_at_a_point(run):
    text = run("dump")
    assert "f32[rows, 64]" in text and "size_rows: rows" in text
    text = run("dump", "--at", "rows=100")
    assert "f32[100, 64]" in text and "rows" not in text


def test_the_peak_is_that_at_the_largest_sizes(run):
    found = {
        at: json.loads(run("memory", "--json", *at))["peak"]["bytes"]
        for at in ((), ("--at", "rows=256"), ("--at", "rows=16"))
    }
    largest, asked, typical = found.values()
    assert largest == asked > 4 * typical


@pytest.mark.slow
def test_reports_and_timelines_of_symbolic_programs(run, tmp_path):
    run("report", "-o", "all.html")
    run("report", "-o", "one.html", "--at", "rows=7")
    assert "rows" in Path("all.html").read_text() and Path("one.html").exists()
    assert json.loads(run("timeline"))["traceEvents"]
    run("dump", "--format", "python", "-o", "program.py")
    spec = importlib.util.spec_from_file_location("program_of_sizes", "program.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert any(getattr(x, "shape", None) == (5, 8) for x in module.inputs(rows=5))


def test_symbolic_programs_are_verified_bisected_and_bundled(run):
    assert "bit for bit equal to the plain model" in run("verify")
    assert "no pass changes numerics" in run("bisect")
    run("dump", "--format", "bundle", "-o", "folder")
    text = CliRunner().invoke(app, ["dump", "folder"]).output
    assert text == run("dump") and "f32[rows, 64]" in text
    at = CliRunner().invoke(app, ["dump", "folder", "--at", "rows=7"]).output
    assert at == run("dump", "--at", "rows=7") and "f32[7, 64]" in at


@pytest.mark.parametrize(
    ("at", "said"),
    [
        ("row=3", "no program has a size 'row'"),
        ("rows=1000", "is not for these sizes"),
        ("rows", "'rows' is no size"),
        ("rows=many", "'rows=many' is no size"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(run, at, said):
    assert said in run("dump", "--at", at, ok=False)

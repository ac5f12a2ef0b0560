"""The example prints what its page says, on one rank and on two that Lightning starts."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning.pytorch")

from lightning_modules import as_launched

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/lightning/train.py"


def shown() -> str:
    """The last line that the page says."""
    return (ROOT / "docs/migrate/lightning.md").read_text().partition("$ python examples/")[2].splitlines()[1]


def test_the_example_on_one_rank(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--folder", str(tmp_path)])
    with as_launched():
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1] == shown()


@pytest.mark.gloo
@pytest.mark.slow
def test_the_example_on_two_ranks(tmp_path):
    command = [sys.executable, str(SCRIPT), "--devices", "2", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == shown()

"""Each script of examples/huggingface runs, on one rank and on two, and ends as its page says."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from trainers import as_launched

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples/huggingface"
PAGE = (ROOT / "docs/migrate/huggingface.md").read_text()
SHOWN = {name: ends for name, *ends in re.findall(r"^\| `(\w+)\.py` \|.*\| `(.*)` \| `?(.*?)`? \|$", PAGE, re.M)}
"""What each ends with, on one rank and on two."""
NEEDS = {"sft": "trl", "grpo": "trl", "lora": "peft"}


def numbers(line: str) -> tuple[str, float, float]:
    name, first, last = re.match(r"(\w+) ([\d.]+) -> ([\d.]+), \d+ programs?$", line).groups()  # type: ignore[union-attr]
    return name, float(first), float(last)


def test_the_page_has_every_script() -> None:
    assert SHOWN.keys() == {path.stem for path in SCRIPTS.glob("*.py")} - {"tiny_llama"}


def test_the_trainers_example(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["trainer.py", "--backend", "eager", "--folder", str(tmp_path)])
    monkeypatch.syspath_prepend(str(SCRIPTS))
    with as_launched():
        runpy.run_path(str(SCRIPTS / "trainer.py"), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1] == SHOWN["trainer"][0]
    assert (tmp_path / "trained/model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", SHOWN)
def test_an_example_ends_as_its_page_says(name: str, ranks: int, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(name, "transformers"))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launch, str(SCRIPTS / f"{name}.py"), "--backend", "eager", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    what, first, last = numbers(done.stdout.splitlines()[-1])
    if name == "grpo" and ranks > 1:  # (each rank draws answers of its own)
        assert what == "reward" and last > 0.8 > first
    else:
        said, *shown = numbers(SHOWN[name][ranks - 1])
        assert what == said and (first, last) == pytest.approx(shown, abs=0.02)

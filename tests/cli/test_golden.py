"""What the commands print, kept as files: a change of a pass or of a text is seen as a readable difference.

`ZGRAPH_GOLDEN=write pytest tests/cli/test_golden.py` writes them anew. They are those of the pinned torch: another captures other graphs.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from ranks import Ranks
from sweeps import sweep
from typer.testing import CliRunner

import zgraph as zg
from zgraph.cli.app import app
from zgraph.cli.targets import load_target
from zgraph.inspection.make_inspection import of_model

HERE = Path(__file__).parents[1]
GOLDEN = HERE / "golden"
WRITE = os.environ.get("ZGRAPH_GOLDEN") == "write"
PLAN = "golden/plan.toml"

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="golden files are those of torch 2.13"
)

MODELS = {
    "gpt2": ("golden_models:gpt2", 2, "h.0.c_fc.weight", "*"),
    "llama8": ("golden_models:llama", 8, "layers.3.up_proj.weight", "layers.3*"),
    "small": ("cli_targets:factory", 2, "second.weight", "*"),
    "llama512": ("golden_models:llama", 512, "layers.3.up_proj.weight", "layers.3*"),
}


@pytest.fixture(autouse=True)
def in_tests_folder(monkeypatch):
    """Targets are named from here; each is captured once for all commands."""
    from zgraph.inspection import make_inspection

    monkeypatch.chdir(HERE)
    monkeypatch.syspath_prepend(str(HERE / "support"))
    monkeypatch.setattr(make_inspection, "of_model", inspected_once)


def inspected_once(model, plan, inputs, world, *, origin="", pass_filter=None, captured=None):
    if not origin:  # (not the target's own step, but one that a command makes of it)
        return of_model(model, plan, inputs, world, captured=captured)
    return _inspected(origin, plan, world)


@functools.cache
def _inspected(origin, plan, world):
    target = load_target(origin)
    return of_model(target.model, plan, target.inputs, world, origin=origin)


def zgraph(*args: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(a) for a in args])
    assert done.exit_code == code, done.output
    return done.stdout + done.stderr


def settled(text: str) -> str:
    """Without what differs from run to run: the seconds that passes took, and where the checkout lies."""
    text = re.sub(r"\d+\.\d+ s\b", "# s", text)
    return text.replace(str(HERE), "tests")


def golden(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    text = settled(text)
    if WRITE:
        path.write_text(text)
        return
    before = path.read_text()
    changed = difflib.unified_diff(before.splitlines(), text.splitlines(), name, "now", lineterm="", n=1)
    assert text == before, "\n".join(changed)


@sweep("model", MODELS, quick=(2,))
def test_the_commands_say_what_they_said(model, tmp_path):
    target, world, param, glob = MODELS[model]
    args = (target, "--plan", PLAN, "--world", world)
    golden(f"{model}.dump", zgraph("dump", *args, "--filter", glob))
    golden(f"{model}.dump-update", zgraph("dump", *args, "--update", "--filter", f"*{param.rpartition('.')[0]}*"))
    golden(f"{model}.passes", zgraph("passes", *args))
    golden(f"{model}.diff", zgraph("diff", *args, "--from", "regather"))
    golden(f"{model}.memory", zgraph("memory", *args))
    golden(f"{model}.forecast", zgraph("forecast", *args))
    golden(
        f"{model}.explain", "\n".join(zgraph("explain", *args, what) for what in (param, "overlap", "peak", "--missed"))
    )
    golden(f"{model}.plan", zgraph("plan", target, "--plan", PLAN, "--world", world))
    golden(f"{model}.check", zgraph("check", *args))
    zgraph("report", *args, "-o", tmp_path / "report.html")
    assert f"{world} ranks" in (tmp_path / "report.html").read_text()
    golden(f"{model}.timeline", lanes(json.loads(zgraph("timeline", *args))))


@sweep(
    "name, target, world",
    [
        ("llama8", "golden_models:small_llama", 8),
        ("gpt2", "golden_models:gpt2", 2),
        ("small", "cli_targets:factory", 2),
    ],
    quick=1,
)
def test_verify_says_what_it_said(name, target, world):
    said = zgraph("verify", target, "--plan", PLAN, "--world", world)
    golden(f"{name}.verify", said.splitlines()[0] + "\n")  # (what follows are errors of rounding)


@sweep("name, target", [("gpt2", "golden_models:gpt2"), ("small", "cli_targets:factory")], quick=1)
def test_bisect_says_what_it_said(name, target):
    args = (target, "--plan", PLAN, "--world", 2)
    golden(f"{name}.bisect", re.sub(r"\S+ \(allowed \S+\)", "# (allowed #)", zgraph("bisect", *args)))


def train(folder: str) -> None:
    """Three steps of GPT-2 on a rank, which leave a bundle behind."""
    import golden_models

    os.environ["ZGRAPH_BUNDLE"] = folder
    model, inputs = golden_models.gpt2()
    model = zg.compile(model, zg.Plan.load(HERE / PLAN).model_copy(update={"backend": "eager"}))
    for _ in range(5):
        model.train_step(*inputs)


@pytest.mark.gloo
@pytest.mark.slow
def test_the_commands_say_of_a_run_on_two_ranks_what_they_said(tmp_path):
    folder = tmp_path / "run"
    with Ranks(2) as ranks:
        ranks.run(train, str(folder))

    def said(command: str, *args: object) -> str:
        return zgraph(command, folder, *args).replace(str(folder), "run")

    golden("run.dump", said("dump", "--filter", "h.0*"))
    golden("run.dump-update", said("dump", "--update", "--filter", "h.0.c_fc*"))
    golden("run.passes", said("passes"))
    golden("run.diff", said("diff", "--from", "regather"))
    golden("run.memory", said("memory"))
    golden("run.forecast", said("forecast"))
    golden(
        "run.explain", "\n".join(said("explain", what) for what in ("h.0.c_fc.weight", "overlap", "peak", "--missed"))
    )
    golden("run.timeline", lanes(json.loads(said("timeline"))))
    assert (
        "<html" in (folder / "report.html").read_text()
        and json.loads((folder / "bundle.json").read_text())["measured"]["steps"] == 5
    )


def lanes(trace: dict) -> str:
    """A trace as a table: events and microseconds of each lane, arrows, changes of memory."""
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    count, total = Counter(), Counter()
    for event in events:
        if event["ph"] == "X":
            key = f"{event['cat']} {names[event['tid']]}"
            count[key] += 1
            total[key] += event["dur"]
    lines = [f"{key}: {count[key]} events, {total[key]:.1f} us" for key in sorted(count)]
    arrows, counters = (sum(e["ph"] == ph for e in events) for ph in "sC")
    return "\n".join([*lines, f"{arrows} arrows, {counters} changes of memory"]) + "\n"

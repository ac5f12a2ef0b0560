"""A search for a plan that is interrupted tells and writes the best so far."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

import zgraph
from zgraph.cli.app import app
from zgraph.inspection import compare_plans

ARGS = ["plan", "cli_targets:factory", "--search", "--world", "4", "-o"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "support"))
    return tmp_path


@pytest.fixture(autouse=True)
def interruptible():
    """(What a shell starts in the background ignores SIGINT, and so would these tests.)"""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(monkeypatch, number, after):
    """Let this signal come during the evaluation after so many."""
    made, count = compare_plans.evaluate, []

    def evaluate(*args, **kwargs):
        if len(count) == after:
            os.kill(os.getpid(), number)
        count.append(None)
        return made(*args, **kwargs)

    monkeypatch.setattr(compare_plans, "evaluate", evaluate)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_best_so_far_is_written(here, monkeypatch, number):
    before = signal.getsignal(signal.SIGTERM)
    interrupted(monkeypatch, number, after=2)
    done = CliRunner().invoke(app, [*ARGS, "best.toml"])
    assert done.exit_code == 130, done.output
    assert "interrupted: the 2 plan(s) until then are compared" in done.stderr and "the best so far" in done.stderr
    assert zgraph.Plan.load(here / "best.toml").zero == 0
    assert sum(line.startswith("zero=") for line in done.stdout.splitlines()) == 2
    assert signal.getsignal(signal.SIGTERM) is before


def test_one_that_is_interrupted_at_once_says_so(here, monkeypatch):
    interrupted(monkeypatch, signal.SIGINT, after=0)
    done = CliRunner().invoke(app, [*ARGS, "best.toml"])
    assert done.exit_code == 130 and "no plan had been evaluated" in done.stderr and not (here / "best.toml").exists()

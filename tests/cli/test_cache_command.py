"""`zgraph cache` lists, checks and clears what is kept."""

import json

import pytest
from typer.testing import CliRunner

from zgraph.cache.store import SUFFIX, Store, hashed
from zgraph.cli.app import app


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ZGRAPH_CACHE", str(tmp_path))
    store = Store(tmp_path / "programs")
    store.put("step", hashed("a"), b"x" * 500, {"model": "Net", "program": "train0"})
    store.put("library", hashed("b"), b"y", {})
    return tmp_path / "programs"


def run(*words):
    return CliRunner().invoke(app, ["cache", *words])


def test_it_lists_what_is_kept(folder):
    shown = run()
    assert shown.exit_code == 0
    assert "2 entries" in shown.output and "Net" in shown.output and "train0" in shown.output
    rows = json.loads(run("--json").output)["entries"]
    assert sorted((row["kind"], row["fault"]) for row in rows) == [("library", None), ("step", None)]


def test_it_finds_what_is_damaged(folder):
    assert run("--check").exit_code == 0
    path = next(folder.glob(f"*/*-step{SUFFIX}"))
    path.write_bytes(path.read_bytes()[:-1])
    checked = run("--check")
    assert checked.exit_code == 1 and f"damaged: {path}" in checked.output


def test_it_clears_the_folder(folder):
    assert "2 files deleted" in run("--clear").output
    assert "0 entries" in run().output
    folder.chmod(0o777)
    assert run("--clear").exit_code == 1

"""A built wheel stands on its own: it installs into an empty environment and imports without torch."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOTS = {"zgraph": "zgraph", "zgraph/passes": "passes", "zgraph/codegen": "codegen"}

pytestmark = pytest.mark.core


def run(*command: object, cwd: Path | None = None) -> str:
    """The command's output; on failure, what it said."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy of the sources, so that the checkout is left as it was."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    for folder in ROOTS.values():
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    # No index and no isolation: the build takes the environment's own setuptools and downloads nothing.
    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    run(sys.executable, "-m", "pip", "wheel", *offline, "-w", out, source)
    return next(out.glob("zgraph-*.whl"))


def loaded_by(code: str, *names: str) -> list[str]:
    """Which of the modules `names` a fresh interpreter has loaded after `code`."""
    probe = f"{code}\nimport json, sys\nprint(json.dumps([name for name in {names!r} if name in sys.modules]))"
    return json.loads(run(sys.executable, "-c", probe).splitlines()[-1])


def test_a_built_wheel_installs_and_imports_in_an_empty_environment(wheel, tmp_path):
    venv.create(tmp_path / "empty", with_pip=False)
    python = tmp_path / "empty" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    code = """
import importlib.util, zgraph, zgraph.errors
assert importlib.util.find_spec("torch") is None and importlib.util.find_spec("pydantic") is None
assert zgraph.__file__.startswith(__import__("sys").prefix), zgraph.__file__
assert all(importlib.util.find_spec("zgraph." + name) for name in ("passes", "codegen"))
print(zgraph.__version__)
"""
    version = run(python, "-I", "-c", code, cwd=tmp_path).strip()
    assert version == wheel.name.split("-")[1]
    assert (tmp_path / "empty" / "bin" / "zgraph").exists()


def test_the_wheel_holds_every_source_the_license_and_the_typing_marks(wheel):
    files = set(zipfile.ZipFile(wheel).namelist())
    for target, folder in ROOTS.items():
        sources = {f"{target}/{file.relative_to(ROOT / folder)}" for file in (ROOT / folder).rglob("*.py")}
        assert sources <= files
        assert f"{target}/py.typed" in files
    assert {f"zgraph/inspection/page/page.{kind}" for kind in ("html", "css")} <= files
    assert {f"zgraph/inspection/page/{script.name}" for script in ROOT.glob("zgraph/inspection/page/*.js")} <= files
    assert any(re.fullmatch(r"zgraph-.*\.dist-info/licenses/LICENSE", file) for file in files)
    assert not [file for file in files if file.startswith("tests/")]


def test_importing_zgraph_loads_neither_torch_nor_pydantic():
    assert loaded_by("import zgraph; dir(zgraph); zgraph.errors", "torch", "pydantic", "yaml") == []


def test_a_plan_can_be_read_without_loading_torch():
    assert loaded_by("import zgraph; zgraph.Plan()", "pydantic", "torch", "numpy") == ["pydantic"]


def test_public_names_are_listed_before_they_are_loaded():
    import zgraph

    assert set(zgraph.__all__) <= set(dir(zgraph))


def test_every_name_that_the_documentation_shows_is_there_without_another_import(monkeypatch):
    import zgraph

    texts = [path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))]
    found = {name for text in texts for name in re.findall(r"(?<![\w./])zgraph\.([a-zA-Z]\w*)(?!\.md)", text)}
    assert {"allocations", "deepspeed", "symbolic", "passes", "errors", "compile", "Plan"} <= found
    for name in found - {"release"}:  # (an operator of programs)
        monkeypatch.delitem(vars(zgraph), name, raising=False)  # (an earlier import may have set it)
        assert getattr(zgraph, name) is not None


@pytest.mark.slow
def test_a_module_of_zgraphs_is_there_in_a_fresh_process():
    lines = "import zgraph; zgraph.deepspeed; zgraph.symbolic; zgraph.allocations; zgraph.checkpoint"
    assert loaded_by(lines, "zgraph.deepspeed.config_sections", "zgraph.forecast.make_symbolic_forecast") == [
        "zgraph.deepspeed.config_sections",
        "zgraph.forecast.make_symbolic_forecast",
    ]


def test_an_unknown_name_is_an_attribute_error():
    import zgraph

    with pytest.raises(AttributeError, match="compyle"):
        zgraph.compyle  # noqa: B018


def test_the_changelog_has_an_entry_for_this_version():
    import zgraph

    assert f"## {zgraph.__version__}" in (ROOT / "CHANGELOG.md").read_text()

"""docs/beliefs.md: each belief about a user's program has a line that checks it, and a test that breaks it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/beliefs.md"
_ROW = re.compile(r"^\| (?P<belief>[^|]+) \| (?P<checks>[^|]+) \| (?P<tests>[^|]+) \|$", re.M)
_NAME = re.compile(r"`([\w/]+\.py)::([\w.]+)`")


def _rows() -> list[tuple[str, list[tuple[str, str]], list[tuple[str, str]]]]:
    """(the belief, what checks it, its tests) of each row; the last two as (file, dotted name)."""
    found = [m for m in _ROW.finditer(PAGE.read_text()) if m["belief"].strip() not in ("belief", "---")]
    return [(m["belief"].strip(), _NAME.findall(m["checks"]), _NAME.findall(m["tests"])) for m in found]


def _defines(file: Path, name: str) -> bool:
    """Has the file a function or class of this dotted name ("Class.method")?"""
    body: list[ast.stmt] = ast.parse(file.read_text()).body
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
        node = next((n for n in body if isinstance(n, kinds) and n.name == part), None)
        if node is None:
            return False
        body = node.body
    return True


@pytest.mark.parametrize(
    "belief, checks, tests", _rows(), ids=lambda value: value[:40] if isinstance(value, str) else ""
)
def test_a_belief_is_checked_and_tested(
    belief: str, checks: list[tuple[str, str]], tests: list[tuple[str, str]]
) -> None:
    assert checks, f"nothing checks: {belief}"
    assert tests, f"nothing tests: {belief}"
    for file, name in [*checks, *tests]:
        assert (ROOT / file).is_file(), f"{file} is gone ({belief})"
        assert _defines(ROOT / file, name), f"{file} has no {name} ({belief})"
    assert all(file.startswith("tests/") for file, _ in tests)


def test_the_page_lists_every_wall() -> None:
    headings = re.findall(r"^## (\w+)", PAGE.read_text(), re.M)
    assert headings[:4] == ["Storage", "Versions", "Layout", "Python"]
    assert len(_rows()) >= 45

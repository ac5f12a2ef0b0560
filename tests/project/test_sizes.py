"""Functions and constructors stay small enough to be read at once."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES = 60
ARGUMENTS = 6


@functools.cache
def trees() -> list[tuple[Path, ast.Module]]:
    """The sources of the package."""
    paths = [p for folder in ("zgraph", "passes", "codegen") for p in sorted((ROOT / folder).rglob("*.py"))]
    return [(path.relative_to(ROOT), ast.parse(path.read_text())) for path in paths]


def too_long(path: Path, tree: ast.Module) -> list[str]:
    """The functions of more than `LINES` lines. Of a command of the command line the parameters, which are its options, don't count."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0].lineno if path.is_relative_to("zgraph/cli") else node.lineno
            lines = int(node.end_lineno or first) - first + 1
            if lines > LINES:
                found.append(
                    f"{path}:{node.lineno} {node.name} has {lines} lines: part it, at most {LINES} are read at once"
                )
    return found


def too_wide(path: Path, tree: ast.Module) -> list[str]:
    """The constructors of more than `ARGUMENTS` arguments. (A dataclass has fields, each with its comment.)"""
    found = []
    for made in ast.walk(tree):
        for node in made.body if isinstance(made, ast.ClassDef) else ():
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                count = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) - 1
                if count > ARGUMENTS:
                    found.append(
                        f"{path}:{node.lineno} {made.name} takes {count} arguments: "
                        f"group what travels together in a record, at most {ARGUMENTS} are told apart"
                    )
    return found


def test_functions_are_short():
    assert [fault for path, tree in trees() for fault in too_long(path, tree)] == []


def test_constructors_take_few_arguments():
    assert [fault for path, tree in trees() for fault in too_wide(path, tree)] == []


def test_what_is_too_long_or_too_wide_is_named():
    long = "def walk():\n" + "    step()\n" * LINES
    wide = "class Room:\n    def __init__(self, a, b, c, d, e, *, f, g): ...\n"
    said = "passes/room.py:1 walk has 61 lines: part it, at most 60 are read at once"
    assert too_long(Path("passes/room.py"), ast.parse(long)) == [said]
    assert too_long(Path("zgraph/cli/room.py"), ast.parse(long)) == []
    said = "passes/room.py:2 Room takes 7 arguments: group what travels together in a record, at most 6 are told apart"
    assert too_wide(Path("passes/room.py"), ast.parse(wide)) == [said]

"""Packages stand on floors: each imports only from those above it in ARCHITECTURE.md's table."""

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).parents[2]
ROOF = ("zgraph", "zgraph.__main__", "zgraph.compiler")
"""What users import: it may know everything, and nothing knows it."""


def floors() -> list[str]:
    """The packages, from the first to the last floor, as they are imported."""
    table = (ROOT / "ARCHITECTURE.md").read_text().partition("| package | what it holds |")[2]
    folders = re.findall(r"^\| `([\w/]+)/` \|", table, re.M)
    return [re.sub(r"^(passes|codegen)$", r"zgraph.\1", folder).replace("/", ".") for folder in folders]


FLOORS = floors()


def modules() -> dict[str, Path]:
    """Every module of zgraph, by its name."""
    found = {}
    for folder, package in (("zgraph", "zgraph"), ("passes", "zgraph.passes"), ("codegen", "zgraph.codegen")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


MODULES = modules()


@functools.cache
def imports(path: Path) -> set[str]:
    """The modules of zgraph that a file imports, also inside functions and for types alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in inner}
    return {name for name in found if name.partition(".")[0] == "zgraph"}


def floor_of(module: str) -> int:
    """The floor that a module is on: that of its package, 0 for what stands at the top."""
    order = FLOORS
    return max(
        (at for at, name in enumerate(order) if f"{module}.".startswith(f"{name}.")), key=lambda at: len(order[at])
    )


@pytest.mark.parametrize("package", FLOORS)
def test_a_package_imports_only_from_floors_above(package):
    mine = [m for m in MODULES if FLOORS[floor_of(m)] == package and m not in ROOF]
    assert mine
    wrong = [
        f"{module} imports {other}"
        for module in mine
        for other in sorted(imports(MODULES[module]))
        if other in ROOF or floor_of(other) > floor_of(module)
    ]
    assert not wrong


def test_no_modules_import_each_other_in_a_circle():
    graph = networkx.DiGraph((m, o) for m, path in MODULES.items() for o in imports(path) if m != o)
    assert [sorted(c) for c in networkx.strongly_connected_components(graph) if len(c) > 1] == []


def test_the_table_names_every_package():
    packages = {m.split(".")[1] for m, path in MODULES.items() if path.name == "__init__.py" and m != "zgraph"}
    assert packages == {name.split(".")[1] for name in FLOORS if name != "zgraph"}


def test_nothing_but_what_all_may_use_stands_at_the_top():
    top = {path.name for path in (ROOT / "zgraph").glob("*.py")}
    assert len(top) <= 8, top


def test_a_file_with_a_pass_has_its_name():
    for name, path in MODULES.items():
        found = [
            ast.unparse(decorator.args[0]).strip("'")
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef)
            for decorator in node.decorator_list
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("graph_pass")
        ]
        assert found in ([], [path.stem]), f"{name} holds {found}"


def test_no_two_files_of_tests_have_one_name():
    """(Tests are imported by the names of their files, on ranks as well.)"""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, times in names.items() if times > 1] == []


def test_an_import_inside_a_function_is_seen_too(tmp_path):
    path = tmp_path / "late.py"
    path.write_text("def f():\n    from zgraph.runtime import runtime\n    import zgraph.build.step_program\n")
    assert imports(path) == {"zgraph.runtime.runtime", "zgraph.build.step_program"}

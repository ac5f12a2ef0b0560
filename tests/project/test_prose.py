"""Prose in code: what a function does is said in the imperative, and each field of a record has a comment of its own."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("zgraph", "passes", "codegen")
# What a docstring in the imperative does not begin with.
NO_VERB = re.compile(
    r"a|an|the|what|which|whether|where|how|who|when|is|are|does|do\(es\)|has|may|can|of|those|that|this|these|as|all|one|each|every|its|it|for|"
    r"with|without|in|on|at|by|from|so|if|not|no|nothing|another|other|likewise|there|their|they|some|any|both|either|neither|two|three"
)
ENDS_IN_S = {
    "focus",
    "discuss",
    "pass",
    "process",
    "address",
    "compress",
    "express",
    "bias",
}  # verbs, in the imperative


@functools.cache
def trees() -> list[tuple[str, str, ast.Module]]:
    """The sources of the package: the name, the text and what it means."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    texts = [path.read_text() for path in paths]
    return [(str(path.relative_to(ROOT)), text, ast.parse(text)) for path, text in zip(paths, texts, strict=True)]


def is_imperative(doc: str) -> bool:
    """Whether the first sentence begins with what may be a verb."""
    first = doc.split()[0].strip("(,.:;").lower()
    third_person = first.endswith("s") and not first.endswith("ss") and first not in ENDS_IN_S
    return not (
        NO_VERB.fullmatch(first) or first.startswith("`") or third_person or doc.split("\n\n")[0].rstrip().endswith("?")
    )


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def is_record(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(d) for d in node.decorator_list) or any(
        "NamedTuple" in ast.unparse(b) for b in node.bases
    )


def uncommented(node: ast.ClassDef, lines: list[str]) -> Iterator[str]:
    for at, field in enumerate(node.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            own = any("#" in lines[row - 1] for row in range(field.lineno, (field.end_lineno or field.lineno) + 1))
            above = lines[field.lineno - 2].strip().startswith("#")
            below = at + 1 < len(node.body) and isinstance(node.body[at + 1], ast.Expr)
            if not (own or above or below):
                yield f"{node.name}.{field.target.id}"


def test_docstrings_are_imperative():
    wrong = [
        f"{path}:{node.lineno} {node.name}: {doc.splitlines()[0]}"
        for path, _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property(node)
        if (doc := ast.get_docstring(node)) and not is_imperative(doc)
    ]
    assert not wrong, "\n".join(wrong)


def test_each_field_of_a_record_has_a_comment():
    wrong = [
        f"{path}: {field}"
        for path, text, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and is_record(node)
        for field in uncommented(node, text.splitlines())
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "doc, said",
    [
        ("Return the bytes.", True),
        ("Compress a gradient.", True),
        ("Whether it is.", False),
        ("The bytes.", False),
        ("Returns the bytes.", False),
        ("Run it: does it fail?", False),
        ("`x` as JSON.", False),
    ],
)
def test_what_counts_as_imperative(doc, said):
    assert is_imperative(doc) is said

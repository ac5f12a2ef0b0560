"""Inductor's code for the sections of a program as one source: kernels of equal sections are defined once, their calls
written for each section.

The body that Inductor wrote for a kind of section is repeated for each of its sections, in order, in one function. So
no function is called for a section, its inputs are freed where Inductor frees them, and whoever reads the code (the
order of collectives, errors, profiles) reads one program. Values that cross a cut are the variables `x0`, `x1`, …; a
section's own variables are deleted at its end.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from zgraph.codegen.sections import Section
from zgraph.program.program import Program
from zgraph.torch_compat.inductor_code import CodeRecord

_NUMBER = re.compile(r"_?\d+$")
_NODES = re.compile(r"(?<=Source Nodes: \[)[^\]]*(?=\])")
_KERNEL = "async_compile."  # what a kernel's definition begins with


class UnknownFormError(Exception):
    """Generated code has a form that can't be taken apart."""


@dataclass(frozen=True)
class GeneratedCode:
    """Inductor's source for a graph, with what running it needs."""

    source: str  # the generated source
    constants: Mapping[str, Any]  # the tensors that the code reads, by name
    inputs_to_check: Sequence[int]  # positions of inputs that it reads as if aligned in memory
    mutated_input_idxs: Sequence[int]  # positions of inputs that it writes to
    # what another process needs to load the code, without the places of its kernels; None where it can't
    record: CodeRecord | None


def join(program: Program, sections: Sequence[Section], codes: Mapping[str, GeneratedCode]) -> GeneratedCode:
    """Return the code of `program` (ready for code generation), joined from its sections' codes by key. Raises
    `UnknownFormError`."""
    top = _Definitions()
    bodies = {key: _body(code.source, top.add(code)) for key, code in codes.items()}
    variables = {node: f"x{i}" for i, node in enumerate(program.placeholders())}
    places = {node: i for i, node in enumerate(variables)}
    checked: set[int] = set()
    written: set[int] = set()
    lines = [f"{_listed(variables.values())} = args", "args.clear()"]
    shifted: set[fx.Node] = set()  # values that may begin within a buffer, at any alignment
    for section in sections:
        body, code = bodies[section.key], codes[section.key]
        for node in (section.takes[at] for at in code.inputs_to_check):
            if node in shifted:
                raise UnknownFormError(f"{node.name} is a part of another buffer, and is read as if aligned")
            checked.update([places[node]] if node in places else ())
        written.update(places[section.takes[at]] for at in code.mutated_input_idxs if section.takes[at] in places)
        shifted.update(section.gives[at] for at in body.shifted)
        variables.update({node: f"x{len(variables) + i}" for i, node in enumerate(section.gives)})
        lines += _calls(section, body, variables)
    lines.append(f"return {_listed(variables[n] for n in program.output_values())}")
    source = "\n".join([*top.lines(), "", "def call(args):", textwrap.indent("\n".join(lines), "    "), ""])
    can_be_loaded = all(code.record is not None for code in codes.values())
    record = CodeRecord(tuple(sorted(checked)), tuple(sorted(written))) if can_be_loaded else None
    return GeneratedCode(source, top.constants, sorted(checked), sorted(written), record)


def _calls(section: Section, body: _Body, variables: Mapping[fx.Node, str]) -> Iterator[str]:
    """Yield the lines of one section: those of its kind's body, with this section's nodes and variables."""
    nodes = {name: node for node, name in section.names().items()}
    left = {node: [variables[n] for n in dead] for node, dead in section.after.items()}
    yield f"{_listed(body.arguments)} = {_listed(variables[n] for n in section.takes)}"
    if section.drops:
        yield f"del {', '.join(variables[n] for n in section.drops)}"
    running: list[fx.Node] = []
    for line in body.lines:
        if line.lstrip().startswith("#") and (match := _NODES.search(line)):
            running = [nodes[name] for name in match[0].split(", ") if name in nodes]
            line = f"{line[: match.start()]}{', '.join(n.name for n in running)}{line[match.end() :]}"
        yield line
        if "wait_tensor" in line and running and (dead := left.pop(running[-1], None)):
            yield f"{line[: len(line) - len(line.lstrip())]}del {', '.join(dead)}"
    if body.results:
        yield f"{_listed(variables[n] for n in section.gives)} = {_listed(body.results)}"
    if ends := [*body.left, *(name for dead in left.values() for name in dead)]:
        yield f"del {', '.join(ends)}"


def _listed(names: Iterable[str]) -> str:
    return f"({''.join(f'{name}, ' for name in names)})"


class _Definitions:
    """What stands above the function: imports and names once, kernels under names that are unique."""

    def __init__(self) -> None:
        self.header: dict[str, None] = {}
        self.values: dict[str, str] = {}
        self.kernels: dict[str, str] = {}  # the name of each kernel, by its definition
        self.constants: dict[str, Any] = {}

    def add(self, code: GeneratedCode) -> dict[str, str]:
        """Add the definitions of a section's code; return the new name of each by its old one."""
        renamed: dict[str, str] = {}
        lines = code.source.encode().splitlines()
        for statement in ast.parse(code.source).body:
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                break  # (what follows is Inductor's code for running it alone)
            text = _segment(lines, statement)
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                self.header[text] = None
            elif isinstance(statement, ast.Assign) and isinstance(target := statement.targets[0], ast.Name):
                renamed[target.id] = self._define(target.id, text.split("=", 1)[1].strip(), code)
            elif not text.startswith((_KERNEL, "del async_compile")):
                raise UnknownFormError(f"{text[:80]!r} stands above the function")
        return renamed

    def _define(self, name: str, value: str, code: GeneratedCode) -> str:
        if name in code.constants:
            known = f"{name}_{len(self.constants)}"
            self.constants[known] = code.constants[name]
            self.header[f"{known} = None"] = None
            return known
        if value.startswith(_KERNEL):
            return self.kernels.setdefault(value, f"{_NUMBER.sub('', name)}_{len(self.kernels)}")
        if self.values.setdefault(name, value) != value:
            raise UnknownFormError(f"{name} is {self.values[name][:80]!r} and {value[:80]!r}")
        self.header[f"{name} = {value}"] = None
        return name

    def lines(self) -> list[str]:
        kernels = [f"{name} = {value}" for value, name in self.kernels.items()]
        ends = ["async_compile.wait(globals())", "del async_compile"]
        return [*self.header, "", *kernels, "", *(ends if "async_compile" in self.values else ())]


@dataclass(frozen=True)
class _Body:
    """The body of a generated function."""

    arguments: tuple[str, ...]  # names of its arguments
    lines: tuple[str, ...]  # its lines between unpacking the arguments and the return, without indentation
    results: tuple[str, ...]  # the expressions that it returns
    left: tuple[str, ...]  # variables that are alive at its end
    shifted: frozenset[int]  # positions of results that may begin within a buffer


def _body(source: str, renamed: Mapping[str, str]) -> _Body:
    """Return the function of a source, with the names defined above it replaced by their new ones.

    Raises `UnknownFormError` where it is more than one straight run from its arguments to its results.
    """
    function = next(
        (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == "call"), None
    )
    match function.body if function is not None else ():
        case [
            ast.Assign(targets=[ast.Tuple(elts=arguments)], value=ast.Name(id="args")),
            ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="args"), attr="clear"))) as cleared,
            *statements,
            ast.Return(value=ast.Tuple(elts=results)) as returned,
        ] if all(isinstance(a, ast.Name) for a in arguments):
            pass
        case _:
            raise UnknownFormError("it does not go from arguments to results")
    names = tuple(a.id for a in arguments if isinstance(a, ast.Name))
    encoded = source.encode().splitlines()
    lines = source.splitlines()[(cleared.end_lineno or 0) : returned.lineno - 1]
    other = {name: new for name, new in renamed.items() if name != new}
    if other:
        words = re.compile(rf"\b({'|'.join(map(re.escape, other))})\b")
        lines = [line if line.lstrip().startswith("#") else words.sub(lambda m: other[m[0]], line) for line in lines]
    there = dict.fromkeys(names)
    offsets: dict[str, bool] = {}
    for statement in _straight(statements):
        if isinstance(statement, ast.Delete):
            for name in ast.walk(statement):
                if isinstance(name, ast.Name):
                    del there[name.id]
        elif isinstance(statement, ast.Assign):
            stored = [n.id for t in statement.targets for n in ast.walk(t) if isinstance(n, ast.Name)]
            there.update(dict.fromkeys(stored))
            offsets.update(dict.fromkeys(stored, _is_shifted(statement.value, offsets)))
    return _Body(
        names,
        tuple(textwrap.dedent("\n".join(lines)).splitlines()),
        tuple(_segment(encoded, r) for r in results),
        tuple(there),
        frozenset(at for at, result in enumerate(results) if _is_shifted(result, offsets)),
    )


def _segment(lines: Sequence[bytes], node: ast.stmt | ast.expr) -> str:
    """Return the text of a node of the source with these lines (`ast.get_source_segment` divides the source each
    time)."""
    end = node.end_lineno or node.lineno
    own = list(lines[node.lineno - 1 : end])
    own[-1] = own[-1][: node.end_col_offset]
    own[0] = own[0][node.col_offset :]
    return b"\n".join(own).decode()


def _straight(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in statements:
        if isinstance(statement, ast.With):
            yield from _straight(statement.body)
        elif isinstance(statement, (ast.Assign, ast.Delete, ast.Expr)):
            yield statement
        else:
            raise UnknownFormError(f"a {type(statement).__name__} is in it")


def _is_shifted(value: ast.expr, known: Mapping[str, bool]) -> bool:
    """Return whether this expression of generated code may begin within a buffer."""
    match value:
        case ast.Name(id=name):
            return known.get(name, False)
        case ast.Call(func=ast.Name(id="reinterpret_tensor"), args=[base, _, _, offset]):
            return _is_shifted(base, known) or not (isinstance(offset, ast.Constant) and offset.value == 0)
    return False

"""A program as text: valid-looking Python, one operator a line, types inline, module path and source line behind it.

    gather_l1_weight: f32[64, 16] = dist.all_gather(l1_weight, 2, "dp")    # gather l1.weight @dp · l1

Names are the graph's own and stay from pass to pass, so two texts can be compared line by line (`diff`).
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import operator
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import torch
from torch import fx

from zgraph.errors import FilterError
from zgraph.program import collectives, ops
from zgraph.program.node import Phase, Role, has_info, info, value
from zgraph.program.program import InputRole, Level, Port, Program
from zgraph.program.sizes import is_symbolic, text, texts

_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}
_CALLS: dict[Any, str] = {
    collectives.ALL_GATHER: "dist.all_gather",
    collectives.REDUCE_SCATTER: "dist.reduce_scatter",
    collectives.ALL_REDUCE: "dist.all_reduce",
    collectives.ALL_TO_ALL: "dist.all_to_all",
    collectives.SHIFT: "dist.shift",
    collectives.WAIT: "dist.wait",
    ops.RELEASE: "zgraph.release",
    ops.OUTPUT: "zgraph.output",
}
_DIM, _BLUE, _PLAIN = "\x1b[2m", "\x1b[34m", "\x1b[0m"


def render(program: Program, *, color: bool = False, filter: str | None = None) -> str:
    """Return the text of a program. `filter` is a glob over node names, module paths and parameters; `color` is for
    terminals.

    Raises `FilterError` if the filter matches no node. A node that has no record yet is printed without what the
    record would say, so that a pass can be looked at while it is written.
    """
    text = "".join(f"{text}\n" for text, _ in lines(program, filter))
    return _colored(text) if color else text


def lines(program: Program, filter: str | None = None) -> Iterator[tuple[str, fx.Node | None]]:
    """Yield the lines of `render`, each with its node: None for headings, and for the list of results."""
    wanted = matching(program, filter)
    yield _title(program), None
    if filter is None:
        yield _facts(program), None
        yield from _signature(program)
    phase: Phase | None = None
    for node in wanted:
        if node.op == "placeholder" and filter is None:
            continue
        if has_info(node) and info(node).phase is not phase:
            phase = info(node).phase
            yield f"    # ---- {phase} ----", None
        yield line(node), node
    if filter is None:
        yield from ((text, None) for text in _results(program))


def matching(program: Program, filter: str | None) -> list[fx.Node]:
    """Return the nodes whose name, module path or parameter a glob matches (every node without one).

    Raises `FilterError` if there are none.
    """
    wanted = [n for n in program.graph.nodes if n.op != "output" and (filter is None or _matches(n, filter))]
    if filter is not None and not wanted:
        raise FilterError(f"no node matches {filter!r}", where=f"program {program.name}", hint=_near(filter, program))
    return wanted


def diff(before: Program, after: Program) -> str:
    """Return what changed from one program to another, as a unified diff of their texts; "" if nothing did."""
    a, b = render(before).splitlines(), render(after).splitlines()
    return "\n".join(difflib.unified_diff(a, b, before.name, after.name, lineterm="", n=2))


def type_text(val: Any) -> str:
    """Return a fake tensor's type as text, "f32[4, 16]"; a tuple of types for a tuple."""
    if isinstance(val, torch.Tensor):
        return f"{_DTYPES.get(val.dtype, str(val.dtype).removeprefix('torch.'))}{texts(val.shape)}"
    if isinstance(val, (tuple, list)):
        return f"({', '.join(type_text(v) for v in val)})"
    if is_symbolic(val):
        return text(val)
    return "None" if val is None else type(val).__name__


def _names(node: fx.Node) -> list[str]:
    """Return what a filter can find a node by: its name, its module's path, its parameter."""
    record = info(node) if has_info(node) else None
    return [text for text in (node.name, record and record.module, record and record.param) if text]


def _matches(node: fx.Node, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(text, pattern) for text in _names(node))


def _near(pattern: str, program: Program) -> str:
    """Return a hint with the names nearest to a glob that matches nothing."""
    names = {text for node in program.graph.nodes if node.op != "output" for text in _names(node)}
    near = difflib.get_close_matches(pattern, sorted(names), n=3, cutoff=0.3)
    if near:
        return f"near it are {', '.join(near)}"
    return "a glob over names of nodes, paths of modules and parameters, such as '*weight*'"


def _title(program: Program) -> str:
    mesh = " x ".join(f"{name} {size}" for name, size in program.mesh.items()) or "none"
    level = Level(program.level).name.lower()
    return f"# program {program.name}: {level}, mesh {mesh}, {len(program.graph.nodes)} nodes"


def _facts(program: Program) -> str:
    parameters = f"{len(program.params)} parameters of {sum(spec.numel for spec in program.params.values())} elements"
    return f"# {parameters}; facts: {', '.join(sorted(program.facts)) or 'none'}"


def _signature(program: Program) -> Iterator[tuple[str, fx.Node | None]]:
    yield "def forward(", None
    for port, node in program.input_items():
        yield _commented(f"    {node.name}: {type_text(value(node))},", _port(port, program)), node
    yield "):", None


def _port(port: Port, program: Program) -> str:
    text = f"{port.role} {port.name}"
    spec = program.params.get(port.name) if port.role is InputRole.PARAMETER else None
    if spec is not None and spec.shard_dim is not None and program.level >= Level.DISTRIBUTED:
        text += f", Shard(0)@{spec.shard_dim} of {_DTYPES.get(spec.dtype, spec.dtype)}{list(spec.shape)}"
    return text


def _results(program: Program) -> list[str]:
    lines = ["    return ("]
    for port, node in program.output_items():
        lines.append(_commented(f"        {node.name},", f"{port.role} {port.name}"))
    return [*lines, "    )"]


def line(node: fx.Node) -> str:
    """Return the line of a node in its program's text."""
    val, code = value(node), _call(node)
    if val is not None:
        code = f"{node.name}: {type_text(val)} = {code}"
    elif "val" not in node.meta:  # not evaluated yet: it may have a value, which others read by this name
        code = f"{node.name} = {code}"
    return _commented(f"    {code}", _comment(node))


def _call(node: fx.Node) -> str:
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return f"self.{node.target}"
    if node.target is operator.getitem:
        return f"{_arg(node.args[0])}[{_arg(node.args[1])}]"
    parts = [*(_arg(a) for a in node.args), *(f"{k}={_arg(v)}" for k, v in node.kwargs.items())]
    return f"{operator_text(node.target)}({', '.join(parts)})"


def operator_text(target: Any) -> str:
    """Return a node's operator as the text shows it: "aten.mm", "dist.all_gather"."""
    if target in _CALLS:
        return _CALLS[target]
    text = str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))
    return text.removesuffix(".default")


def _arg(arg: Any) -> str:
    if isinstance(arg, fx.Node):
        return arg.name
    if isinstance(arg, (list, tuple)):
        inner = ", ".join(_arg(a) for a in arg)
        return f"[{inner}]" if isinstance(arg, list) else f"({inner}{',' if len(arg) == 1 else ''})"
    if isinstance(arg, str):
        return json.dumps(arg, ensure_ascii=False)
    if isinstance(arg, torch.device):
        return f'"{arg}"'
    return str(arg)


def _comment(node: fx.Node) -> str:
    if not has_info(node):
        return ""
    record = info(node)
    parts = []
    if record.role is not Role.COMPUTE:
        served = [record.role, record.param, record.mesh_dim and f"@{record.mesh_dim}"]
        parts.append(" ".join(text for text in served if text))
    if record.bucket:
        parts.append(f"in {record.bucket}")
    if record.group:
        parts.append(record.group)
    if record.chunk:
        parts.append(f"chunk of {record.chunk}")
    if record.ahead:
        parts.append("ahead of the forward")
    if record.home:
        parts.append(f"lies in {record.home}")
    if record.copy_of:
        parts.append(f"again {record.copy_of}")
    if record.module:
        parts.append(record.module)
    if record.source:
        path, _, line = record.source.rpartition(":")
        parts.append(f"{PurePath(path).name}:{line}")
    return " · ".join(parts)


def _commented(code: str, comment: str) -> str:
    return f"{code:<88}  # {comment}" if comment else code


def _colored(text: str) -> str:
    """Color comments dim and collectives blue; the text without the escapes is unchanged."""
    return "".join(f"{_colored_line(line)}\n" for line in text.splitlines())


def _colored_line(line: str) -> str:
    if line.lstrip().startswith("#"):
        return f"{_DIM}{line}{_PLAIN}"
    code, mark, comment = line.partition("  # ")
    if any(f"{call}(" in code for call in _CALLS.values()):
        code = f"{_BLUE}{code}{_PLAIN}"
    return f"{code}{_DIM}{mark}{comment}{_PLAIN}" if mark else code

"""A program as a Graphviz drawing: operators in boxes by module, collectives and offload transfers in colour."""

from __future__ import annotations

import json
from collections.abc import Iterable

from torch import fx

from zgraph.program import collectives, transfers_to_host
from zgraph.program.node import has_info, info, value
from zgraph.program.printer import type_text
from zgraph.program.program import Program

_TRANSFER, _MOVE, _INPUT = "#cfe2ff", "#ffe5b4", "#e2e3e5"


def dot(program: Program, wanted: Iterable[fx.Node] | None = None) -> str:
    """Return the graph of a program, or of the `wanted` nodes and the edges between them, in Graphviz' language."""
    shown = dict.fromkeys(wanted if wanted is not None else program.graph.nodes)
    lines = [
        f"digraph {_quoted(program.name)} {{",
        "  node [shape=box, style=filled, fillcolor=white, fontname=monospace];",
    ]
    modules: dict[str, list[fx.Node]] = {}
    for node in shown:
        modules.setdefault(info(node).module if has_info(node) else "", []).append(node)
    for at, (module, nodes) in enumerate(modules.items()):
        indent = "  "
        if module:
            lines += [f"  subgraph cluster_{at} {{", f"    label={_quoted(module)};"]
            indent = "    "
        lines += [f"{indent}{_quoted(node.name)} [label={_label(node)}{_color(node)}];" for node in nodes]
        lines += ["  }"] if module else []
    lines += [
        f"  {_quoted(read.name)} -> {_quoted(node.name)};"
        for node in shown
        for read in node.all_input_nodes
        if read in shown
    ]
    return "\n".join([*lines, "}"]) + "\n"


def _label(node: fx.Node) -> str:
    kind = str(node.target).removesuffix(".default") if node.op == "call_function" else node.op
    shown = type_text(value(node)) if node.op != "output" else ""
    return _quoted("\n".join(text for text in (node.name, kind, shown) if text))


def _color(node: fx.Node) -> str:
    if node.op != "call_function":
        return f', fillcolor="{_INPUT}"'
    if collectives.is_start(node) or collectives.is_wait(node):
        return f', fillcolor="{_TRANSFER}"'
    return f', fillcolor="{_MOVE}"' if transfers_to_host.is_host_transfer(node) else ""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

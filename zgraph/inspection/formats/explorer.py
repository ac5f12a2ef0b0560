"""A program for Google's Model Explorer: modules nested by their paths, bytes and time as overlays.

The graph is a list of one graph collection (`model_explorer.graph_builder.GraphCollection`). Model Explorer reads each
overlay from a file of its own, with a graph's node data by the graph's id
(`model_explorer.node_data_builder.ModelNodeData`).
"""

from __future__ import annotations

from typing import Any

from torch import fx

from zgraph.passes.analysis.costs import Costs, size_of
from zgraph.passes.analysis.simulator import simulate
from zgraph.program.node import has_info, info, value
from zgraph.program.printer import type_text
from zgraph.program.program import Program

_GRADIENT = [{"stop": 0.0, "bgColor": "#fff7ec"}, {"stop": 1.0, "bgColor": "#d7301f"}]


def explorer(program: Program) -> list[dict[str, Any]]:
    """Return the program as graph collections."""
    graph = {
        "id": program.name,
        "nodes": [_node(node) for node in program.graph.nodes],
        "groupNodeAttributes": {"": {"mesh": str(program.mesh), "nodes": str(len(program.graph.nodes))}},
    }
    return [{"label": f"zgraph {program.name}", "graphs": [graph]}]


def overlays(program: Program, costs: Costs) -> dict[str, dict[str, Any]]:
    """Return node data by overlay: "bytes" of each node's value, and the "microseconds" that it takes by `costs`."""
    times: dict[str, float] = {}
    for span in simulate(program, costs).spans:
        times[span.node] = times.get(span.node, 0.0) + span.seconds * 1e6
    sizes = {n.name: float(size_of(n)) for n in program.graph.nodes if n.op != "output" and size_of(n)}
    return {
        "bytes": {program.name: _overlay("bytes", sizes)},
        "microseconds": {program.name: _overlay("microseconds", times)},
    }


def _overlay(name: str, results: dict[str, float]) -> dict[str, Any]:
    return {"name": name, "results": {k: {"value": v} for k, v in results.items()}, "gradient": _GRADIENT}


def _node(node: fx.Node) -> dict[str, Any]:
    edges = [
        {"sourceNodeId": read.name, "sourceNodeOutputId": "0", "targetNodeInputId": str(at)}
        for at, read in enumerate(node.all_input_nodes)
    ]
    kind = str(node.target).removesuffix(".default") if node.op == "call_function" else node.op
    record = info(node) if has_info(node) else None
    attrs = {"name": node.name}
    if record is not None:
        attrs |= {
            "role": record.role.value,
            "phase": record.phase.value,
            "module": record.module,
            "source": record.source,
            "parameter": record.param or "",
            "made by": record.made_by,
            "again": record.copy_of or "",
            "bucket": record.bucket or "",
        }
    path = f"{record.phase.value}/{record.module.replace('.', '/')}".rstrip("/") if record is not None else ""
    row: dict[str, Any] = {
        "id": node.name,
        "label": kind,
        "namespace": path,
        "attrs": [{"key": k, "value": v} for k, v in attrs.items() if v],
        "incomingEdges": edges,
    }
    if node.op != "output":
        shape = {"key": "tensor_shape", "value": type_text(value(node))}
        row["outputsMetadata"] = [{"id": "0", "attrs": [shape]}]
    return row

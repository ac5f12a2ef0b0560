"""Runs an eager program node by node under a profiler, in ranges named after modules and passes.

A range spans neighbouring nodes of one module (or, for nodes that a pass inserted, of one pass and parameter):
"zgraph:forward model.layers.0.mlp", "zgraph:shard_parameters gather model.layers.0.mlp.up_proj.weight".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import fx
from torch.autograd.profiler import record_function

from zgraph.program.node import NodeInfo, info


def range_name(record: NodeInfo) -> str:
    """Return the name of the profiler's range for a node with this record."""
    if record.made_by == "capture":
        return f"zgraph:{record.phase} {record.module or '(root)'}"
    return f"zgraph:{record.made_by} {record.role} {record.param or record.module or '(root)'}"


def run_profiled(module: fx.GraphModule, values: list[Any], keep: Callable[[str, Any], Any]) -> Sequence[Any]:
    """Run a boxed eager module on `values` (emptied) inside named ranges: the same operators in the same order.

    `keep(name, value)` returns the value that a node's readers get.
    """
    environment: dict[fx.Node, Any] = {}
    left = {node: len(node.users) for node in module.graph.nodes}
    nodes = [n for n in module.graph.nodes if n.op != "output"]
    for node, given in zip(module.graph.find_nodes(op="placeholder"), values, strict=True):
        environment[node] = given
    values.clear()
    given = None
    with torch.no_grad():
        for name, group in groupby((n for n in nodes if n.op != "placeholder"), key=lambda n: range_name(info(n))):
            with record_function(name):
                for node in group:
                    environment[node] = keep(node.name, _run(module, node, environment))
                    for used in node.all_input_nodes:
                        left[used] -= 1
                        if not left[used]:
                            del environment[used]
    result: Any = module.graph.output_node().args[0]
    return tuple(environment[n] for n in result)


def _run(module: fx.GraphModule, node: fx.Node, environment: dict[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        return getattr(module, str(node.target))
    args: Any = fx.node.map_arg(node.args, lambda n: environment[n])
    kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: environment[n])
    return node.target(*args, **kwargs)  # type: ignore[operator]

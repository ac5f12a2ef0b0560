"""FX graphs: modules whose code is written lazily, calling conventions, strides of recorded values."""

from __future__ import annotations

from typing import Any

from torch import fx


def boxed(graph: fx.Graph) -> None:
    """Let a graph take its inputs as one list that it empties, so that each dies after its last use."""
    from torch.fx.graph import _BoxedCodeGen

    graph.set_codegen(_BoxedCodeGen())


def lazy_module(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """A graph module whose Python code is written when someone reads or calls it, not at each change."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)


def fix_strides(node: fx.Node) -> None:
    """Let Inductor make this value with the strides that it has in the program: a reader that needs them would else get a copy,
    and another one the value itself."""
    if node.op == "call_function":
        node.meta = {**node.meta, "inductor_realize_to_strides": True}

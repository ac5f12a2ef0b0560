"""FX graphs: modules whose code is written lazily, calling conventions, strides of recorded values."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

_FIXED = "inductor_realize_to_strides"


def boxed(graph: fx.Graph) -> None:
    """Let a graph take its inputs as one list that it empties, so that each dies after its last use."""
    from torch.fx.graph import _BoxedCodeGen

    graph.set_codegen(_BoxedCodeGen())


def lazy_module(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """Return a graph module whose Python code is written when someone reads or calls it, not at each change."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)


@functools.cache
def _builtins() -> frozenset[int]:
    """Return the ids of torch's functions that do not record their module (`torch.add`, `torch._C._nn.linear`)."""
    of_c: Any = torch._C
    inner = ("_nn", "_VariableFunctions", "_fft", "_linalg", "_special")
    places = (torch, torch.Tensor, *(getattr(of_c, name) for name in inner if hasattr(of_c, name)))
    return frozenset(id(getattr(place, name, None)) for place in places for name in dir(place))


def is_torchs(function: Any) -> bool:
    """Return whether this is one of torch's own functions that are written in C++."""
    kinds = ("builtin_function_or_method", "method_descriptor")
    return type(function).__name__ in kinds and id(function) in _builtins()


class FrozenGraph:
    """A module's graph as it is when this is made.

    It holds what the nodes have (nobody changes these objects in place); a copy of the graph takes thirty times as long
    and is made when first asked for.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._root = module
        self._nodes = [_parts(node) for node in module.graph.nodes]
        if any(node.op == "get_attr" for node, *_ in self._nodes):  # (the module may have other attributes later)
            _ = self.module

    def is_of(self, module: fx.GraphModule) -> bool:
        """Return whether the module's graph is still the same, node by node."""
        nodes = module.graph.nodes
        return len(nodes) == len(self._nodes) and all(
            len(frozen_parts) == len(parts) and all(map(operator.is_, frozen_parts, parts))
            for frozen_parts, parts in zip(self._nodes, map(_parts, nodes), strict=True)
        )

    @functools.cached_property
    def module(self) -> fx.GraphModule:
        """A graph module with a copy of the graph."""
        graph = fx.Graph()
        memo: dict[fx.Node, fx.Node] = {}
        for node, name, target, args, kwargs, *meta in self._nodes:
            read: Any
            read, named = (fx.map_arg(part, memo.__getitem__) for part in (args, kwargs))
            name = "output" if node.op == "output" else name  # (as torch's own copies have it)
            new_node = memo[node] = graph.create_node(node.op, target, read, named, name, node.type)
            new_node.meta.update(zip(meta[: len(meta) // 2], meta[len(meta) // 2 :], strict=True))
        return lazy_module(self._root, graph)


def _parts(node: fx.Node) -> tuple[Any, ...]:
    """Return the node, and what a copy takes of it."""
    return (node, node.name, node.target, node.args, node.kwargs, *node.meta, *node.meta.values())


def fix_strides(node: fx.Node) -> None:
    """Make Inductor store this value with the strides that it has in the program.

    Else a reader that needs these strides would get a copy of it.
    """
    if node.op == "call_function":
        node.meta = {**node.meta, _FIXED: True}


def has_fixed_strides(node: fx.Node) -> bool:
    """Return whether Inductor stores this value with the strides that it has in the program."""
    return bool(node.meta.get(_FIXED, False))


def with_fixed_strides(graph: fx.Graph) -> tuple[str, ...]:
    """Return the names of the values of a graph that `has_fixed_strides` is true of."""
    return tuple(n.name for n in graph.nodes if has_fixed_strides(n))

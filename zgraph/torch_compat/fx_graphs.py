"""FX graphs: modules whose code is written lazily, calling conventions, strides of recorded values."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx


def boxed(graph: fx.Graph) -> None:
    """Let a graph take its inputs as one list that it empties, so that each dies after its last use."""
    from torch.fx.graph import _BoxedCodeGen

    graph.set_codegen(_BoxedCodeGen())


def lazy_module(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """A graph module whose Python code is written when someone reads or calls it, not at each change."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)


@functools.cache
def _builtins() -> frozenset[int]:
    """The functions that torch gives without saying whose they are (`torch.add`, `torch._C._nn.linear`)."""
    of_c: Any = torch._C
    inner = ("_nn", "_VariableFunctions", "_fft", "_linalg", "_special")
    places = (torch, torch.Tensor, *(getattr(of_c, name) for name in inner if hasattr(of_c, name)))
    return frozenset(id(getattr(place, name, None)) for place in places for name in dir(place))


def is_torchs(function: Any) -> bool:
    """Whether this is one of torch's own functions that are written in C++."""
    kinds = ("builtin_function_or_method", "method_descriptor")
    return type(function).__name__ in kinds and id(function) in _builtins()


def fix_strides(node: fx.Node) -> None:
    """Let Inductor make this value with the strides that it has in the program: a reader that needs them would else get a copy,
    and another one the value itself."""
    if node.op == "call_function":
        node.meta = {**node.meta, "inductor_realize_to_strides": True}

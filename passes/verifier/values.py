"""The rule about values: each is what its operator gives."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from zgraph.passes.verifier.faults import Faults, fault
from zgraph.program.node import value
from zgraph.program.program import Program
from zgraph.program.sizes import static


class ValueCache:
    """Remembers what operators give for arguments of given types: equal layers are evaluated once."""

    def __init__(self) -> None:
        self.known: dict[Any, Any] = {}


def check_values(program: Program, cache: ValueCache) -> Faults:
    """Each node's recorded value is what its operator's fake implementation gives for its arguments."""
    types = _Types()
    for node in program.graph.nodes:
        if node.op != "call_function" or (
            not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem
        ):
            continue
        if node.target is operator.getitem:
            expected = type_of(value(node.args[0])[node.args[1]])
        else:
            key = (node.target, types.key(node.args), types.key(tuple(sorted(node.kwargs.items()))))
            if key not in cache.known:
                try:
                    cache.known[key] = type_of(program.evaluate(node))
                except Exception as error:
                    yield fault(
                        program,
                        node,
                        f"node {node.name!r} can't be evaluated",
                        f"{type(error).__name__}: {error}",
                    )
                    continue
            expected = cache.known[key]
        if types.of(node) != expected:
            yield fault(
                program,
                node,
                f"node {node.name!r} has the wrong value",
                f"it is recorded as {type_of(value(node))}; its operator gives {expected}",
            )


class _Types:
    """The types of the nodes of one graph, each looked at once."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, Any] = {}

    def of(self, node: fx.Node) -> Any:
        found = self._known.get(node)
        if found is None:
            found = self._known[node] = type_of(value(node))
        return found

    def key(self, arg: Any) -> Any:
        """What of an argument decides the type of an operator's result."""
        if isinstance(arg, fx.Node):
            return ("attr", arg.target) if value(arg) is None else self.of(arg)
        if isinstance(arg, (tuple, list)):
            return tuple(self.key(a) for a in arg)
        if isinstance(arg, dict):
            return tuple((k, self.key(v)) for k, v in sorted(arg.items()))
        return (type(arg).__name__, str(arg))


def type_of(val: Any) -> Any:
    if isinstance(val, torch.Tensor):
        # The stride of a dimension of size 1 means nothing, and operators disagree about it.
        sizes, strides = tuple(map(static, val.shape)), tuple(map(static, val.stride()))
        strides = tuple(s if n != 1 else 0 for s, n in zip(strides, sizes, strict=True)) if 0 not in sizes else ()
        return (val.dtype, sizes, strides, str(val.device))
    if isinstance(val, (tuple, list)):
        return tuple(type_of(v) for v in val)
    return static(val) if isinstance(val, torch.SymInt) else type(val).__name__

"""The rule about values: each recorded value is the one that its operator gives."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from zgraph.passes.verifier.faults import Faults, fault
from zgraph.program.node import value
from zgraph.program.program import Program
from zgraph.program.sizes import static
from zgraph.torch_compat import symbols


class ValueCache:
    """What operators give for arguments of given types, so that equal layers are evaluated once; and the nodes whose
    values were found to be right, so that nodes which no pass has touched since are not checked again.
    """

    def __init__(self) -> None:
        self.known: dict[Any, Any] = {}
        self._right: dict[fx.Node, tuple[Any, ...]] = {}

    def is_right(self, node: fx.Node) -> bool:
        """Return whether a node, its arguments and their values are the very objects that were right before."""
        before = self._right.get(node)
        return before is not None and all(map(operator.is_, before, _parts(node)))

    def note_right(self, node: fx.Node) -> None:
        self._right[node] = _parts(node)


def _parts(node: fx.Node) -> tuple[Any, ...]:
    """Return all parts of a node that the rule compares. (Arguments are immutable, and a fake value stays what it is.)"""
    return (node.target, node.args, node.kwargs, value(node), *map(value, node.all_input_nodes))


# The types of results of torch's own operators, for arguments whose sizes are numbers; shared by all programs of the process.
_torchs: dict[Any, Any] = {}
_TORCHS = ("aten", "prims", "_c10d_functional")
_MOST = 20_000  # entries of a cache; a full one is emptied


def check_values(program: Program, cache: ValueCache) -> Faults:
    """Check that each node's recorded value is what its operator's fake implementation gives for its arguments."""
    types = _Types()
    for node in program.graph.nodes:
        if node.op != "call_function" or (
            not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem
        ):
            continue
        if cache.is_right(node):
            continue
        if node.target is operator.getitem:
            expected = type_of(value(node.args[0])[node.args[1]])
        else:
            try:
                expected = _expected(program, node, types, cache)
            except Exception as error:
                yield fault(
                    program,
                    node,
                    f"node {node.name!r} can't be evaluated",
                    f"{type(error).__name__}: {error}",
                )
                continue
        if types.of(node) != expected:
            yield fault(
                program,
                node,
                f"node {node.name!r} has the wrong value",
                f"it is recorded as {type_of(value(node))}; its operator gives {expected}",
            )
        else:
            cache.note_right(node)


def _expected(program: Program, node: fx.Node, types: _Types, cache: ValueCache) -> Any:
    """Return the type of the value that a node's operator gives for its arguments."""
    key: Any = (node.target, types.key(node.args), types.key(tuple(sorted(node.kwargs.items()))))
    # (symbols, and constants that a module holds by name, mean something in this program alone)
    everywhere = not program.sizes and getattr(node.target, "namespace", "") in _TORCHS
    everywhere = everywhere and all(value(a) is not None for a in node.all_input_nodes)
    known = _torchs if everywhere else cache.known
    if everywhere:
        key = (torch.get_default_dtype(), *key)
    if key not in known:
        result = program.evaluate(node)
        result_type = type_of(result)
        if everywhere and symbols.has_symbol(result):
            return result_type
        if len(known) >= _MOST:
            known.clear()
        known[key] = result_type
    return known[key]


class _Types:
    """The types of the nodes of one graph, each looked at once."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, Any] = {}

    def of(self, node: fx.Node) -> Any:
        value_type = self._known.get(node)
        if value_type is None:
            value_type = self._known[node] = type_of(value(node))
        return value_type

    def key(self, arg: Any) -> Any:
        """Return the part of an argument that decides the type of an operator's result."""
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

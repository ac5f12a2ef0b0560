"""Keeps what a model asserts about values: `assert` on a tensor, `if …: raise`, `torch._assert`, `torch._assert_async`, `torch._check` on `.item()`.

AOTAutograd leaves such a check in the joint graph as an operator that nobody reads. Here it becomes `zgraph::check`, whose result is an output
of the program (`OutputRole.CHECK`), so that every later pass, which keeps what outputs need, keeps it too: in the stage and on the ranks that
compute its operand, in the forward or the backward, and never recomputed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from zgraph.errors import UnsupportedError
from zgraph.program import ops
from zgraph.program.node import NodeInfo, Phase, info
from zgraph.program.program import OutputRole, Port, Program

aten = torch.ops.aten

UNNAMED = "Expected Tensor with single nonzero value, but got zero"  # (PyTorch's own words)
_GENERATED = "Runtime assertion failed for expression"  # torch's own, beside those that the user wrote


def name_asserts(module: fx.GraphModule) -> None:
    """Give each `torch._assert_async` without a message PyTorch's own one: AOTAutograd drops the operator without a message as dead."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.find_nodes(op="call_function", target=torch._assert_async):
                if len(node.args) == 1 and not node.kwargs:
                    node.args = (node.args[0], UNNAMED)


def keep_asserts(program: Program) -> list[tuple[Port, fx.Node]]:
    """Replace each assertion in a program by a check; returns these as outputs. Raises `UnsupportedError` for one on Python numbers that can't be
    computed as tensors."""
    found = [n for n in program.graph.nodes if n.target in (aten._assert_async.msg, aten._assert_scalar.default)]
    numbers = _Numbers(program)
    results = []
    for node in found:
        condition, message = node.args[0], str(node.args[1])
        late = message.startswith(_GENERATED)  # (the user's own words first)
        before = _end_of_forward(program) if late and info(node).phase is Phase.FORWARD else node
        if isinstance(condition, fx.Node):
            tensor = numbers.tensor(condition, before)
            with program.graph.inserting_before(before):
                made = program.call(ops.CHECK, (tensor, message), info(node), name="check")
            results.append((Port(OutputRole.CHECK, made.name), made))
        program.graph.erase_node(node)
    numbers.clean()
    for _, check in results:
        _let_parts_be_checked(program, check.all_input_nodes[0])
    return results


def _let_parts_be_checked(program: Program, condition: fx.Node) -> None:
    """Write what a check alone reads of a whole tensor (`all`, `any`, `max`, `min`) as a sum or a maximum: of these, passes know how ranks that have
    parts of the tensor compute them together."""
    stack = [condition]
    while stack:
        node = stack.pop()
        if node.op != "call_function" or len(node.users) != 1:
            continue
        stack += node.all_input_nodes
        if node.target not in _WHOLE or len(node.args) != 1 or node.kwargs:
            continue
        x = node.all_input_nodes[0]
        if node.target not in (aten.max.default, aten.min.default):
            made = _counted(program, node, x)
        elif x.meta["val"].is_floating_point():
            made = _extreme(program, node, x)
        else:
            continue
        node.replace_all_uses_with(made)
        program.graph.erase_node(node)


_WHOLE = {
    aten.all.default,
    aten._is_all_true.default,
    aten.any.default,
    aten.any.dims,
    aten.max.default,
    aten.min.default,
}


def _counted(program: Program, node: fx.Node, x: fx.Node) -> fx.Node:
    """All are true: none is not. Any is: one or more."""
    record, every = info(node), node.target in (aten.all.default, aten._is_all_true.default)
    with program.graph.inserting_before(node):
        if x.meta["val"].dtype is not torch.bool:
            x = program.call(aten.ne.Scalar, (x, 0), record, name="checked")
        if every:
            x = program.call(aten.logical_not.default, (x,), record, name="checked")
        count = program.call(aten.sum.default, (x,), record, name="checked")
        compare = aten.eq.Scalar if every else aten.ne.Scalar
        return program.call(compare, (count, 0), record, name=node.name)


def _extreme(program: Program, node: fx.Node, x: fx.Node) -> fx.Node:
    record = info(node)
    with program.graph.inserting_before(node):
        if node.target is aten.max.default:
            return program.call(aten.amax.default, (x,), record, name=node.name)
        mirrored = program.call(aten.neg.default, (x,), record, name="checked")
        largest = program.call(aten.amax.default, (mirrored,), record, name="checked")
        return program.call(aten.neg.default, (largest,), record, name=node.name)


def _end_of_forward(program: Program) -> fx.Node:
    """The first node behind the forward."""
    return next(
        (n for n in program.graph.nodes if n.op != "placeholder" and _phase(n) is not Phase.FORWARD),
        program.output_node(),
    )


def _phase(node: fx.Node) -> Phase | None:
    return None if node.op == "output" else info(node).phase


class _Numbers:
    """Computes with tensors what the graph computes with the Python numbers that `.item()` gave."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._made: dict[fx.Node, fx.Node] = {}

    def tensor(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """The 0-dim tensor that a number is, computed in front of a node; a tensor itself."""
        if isinstance(node.meta.get("val"), torch.Tensor) and node.target is not aten.scalar_tensor.default:
            return node
        if node in self._made:
            return self._made[node]
        record = info(node)
        if node.target is aten._local_scalar_dense.default:
            return self._item(node, node.all_input_nodes[0], before, record)
        if node.target is aten.scalar_tensor.default and isinstance(node.args[0], fx.Node):
            return self.tensor(node.args[0], before)
        target = _OPERATORS.get(node.target)  # type: ignore[arg-type]
        if target is None or not node.all_input_nodes:
            raise UnsupportedError(
                "the model checks a Python number that it computes from a tensor's values",
                where=record.source or None,
                why=f"{node.name} ({node.target}) can't be kept in the program",
                hint="check the tensor itself: assert (x < limit).all(), 'message'",
            )
        args = [self.tensor(a, before) if isinstance(a, fx.Node) else a for a in node.args]
        with self.program.graph.inserting_before(before):
            self._made[node] = target(self._call, record, *args)
        return self._made[node]

    def _item(self, node: fx.Node, source: fx.Node, before: fx.Node, record: NodeInfo) -> fx.Node:
        with self.program.graph.inserting_before(before):
            wide = source.meta["val"].is_floating_point()
            number = _widened(self._call, record, source) if wide else source
            if source.meta["val"].dim():
                number = self._call(aten.view.default, (number, []), record)
        self._made[node] = number
        return number

    def _call(
        self, target: Any, args: tuple[Any, ...], record: NodeInfo, kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        return self.program.call(target, args, record, name="checked", kwargs=kwargs)

    def clean(self) -> None:
        """Remove the numbers that nobody reads any more."""
        for node in reversed(self.program.nodes):
            number = not isinstance(node.meta.get("val"), torch.Tensor) or node.target is aten.scalar_tensor.default
            if node.op == "call_function" and number and not node.users and _is_number(node):
                self.program.graph.erase_node(node)


def _is_number(node: fx.Node) -> bool:
    known = (aten._local_scalar_dense.default, aten.scalar_tensor.default)
    return node.target in known or node.target in _OPERATORS


Maker = Callable[..., fx.Node]


def _binary(name: str, mirrored: str | None = None) -> Maker:
    """A comparison or sum as an operator of tensors; `mirrored` is the one that gives the same with its operands exchanged."""

    def make(call: Callable[..., fx.Node], record: NodeInfo, one: Any, other: Any) -> fx.Node:
        if not isinstance(one, fx.Node):
            if mirrored is None:
                one = _constant(call, record, one)
            else:
                return _binary(mirrored)(call, record, other, one)
        kind = "Tensor" if isinstance(other, fx.Node) else "Scalar"
        return call(getattr(getattr(aten, name), kind), (one, other), record)

    return make


def _unary(target: Any) -> Maker:
    return lambda call, record, one: call(target, (one,), record)


def _chosen(call: Callable[..., fx.Node], record: NodeInfo, condition: Any, one: Any, other: Any) -> fx.Node:
    ends = [x if isinstance(x, fx.Node) else _constant(call, record, x) for x in (one, other)]
    return call(aten.where.self, (condition, *ends), record)


def _constant(call: Callable[..., fx.Node], record: NodeInfo, number: Any) -> fx.Node:
    return call(aten.full.default, ([], number), record, {"dtype": torch.float64})


def _widened(call: Callable[..., fx.Node], record: NodeInfo, one: Any) -> fx.Node:
    return call(torch.ops.prims.convert_element_type.default, (one, torch.float64), record)


def _operators() -> Iterator[tuple[Any, Maker]]:
    yield operator.lt, _binary("lt", "gt")
    yield operator.le, _binary("le", "ge")
    yield operator.gt, _binary("gt", "lt")
    yield operator.ge, _binary("ge", "le")
    yield operator.eq, _binary("eq", "eq")
    yield operator.ne, _binary("ne", "ne")
    yield operator.add, _binary("add", "add")
    yield operator.mul, _binary("mul", "mul")
    yield operator.sub, _binary("sub")
    yield operator.truediv, _binary("div")
    yield operator.mod, _binary("remainder")
    yield operator.and_, _binary("bitwise_and", "bitwise_and")
    yield operator.or_, _binary("bitwise_or", "bitwise_or")
    yield operator.neg, _unary(aten.neg.default)
    yield operator.not_, _unary(aten.logical_not.default)
    yield torch.sym_not, _unary(aten.logical_not.default)
    yield torch.sym_float, _widened
    yield torch.sym_ite, _chosen


_OPERATORS: dict[Any, Maker] = dict(_operators())

"""Keeps what a model asserts about values: `assert` on a tensor, `if …: raise`, `torch._assert`, `torch._assert_async`,
`torch._check` on `.item()`.

AOTAutograd leaves such a check in the joint graph as an operator whose result nobody reads. Here it becomes
`zgraph::check`, whose result is an output of the program (`OutputRole.CHECK`). Every later pass keeps what outputs
need, and so keeps the check: in the stage and on the ranks that compute its operand, in the forward or the backward,
and never recomputed.
"""

from __future__ import annotations

import torch
from torch import fx

from zgraph.errors import SizeError
from zgraph.program import ops
from zgraph.program.node import Phase, info
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
    """Replace each assertion of a tensor in a program by a check, and return the checks as outputs.

    An assertion of a Python number that depends on values has become one of a tensor before
    (`zgraph.capture.data_dependent_sizes`); those of other numbers hold already.
    """
    checks = []
    for node in [n for n in program.graph.nodes if n.target in (aten._assert_async.msg, aten._assert_scalar.default)]:
        condition, message = node.args[0], str(node.args[1])
        late = message.startswith(_GENERATED)  # (the user's own words first)
        before = _end_of_forward(program) if late and info(node).phase is Phase.FORWARD else node
        if isinstance(condition, fx.Node):
            if not isinstance(condition.meta["val"], torch.Tensor):
                raise SizeError(
                    "the model asserts what a number is that it takes from a tensor",
                    where=info(node).source or None,
                    why="programs whose sizes differ from call to call know no such number",
                    hint="assert it of the tensor: torch._assert(x.sum() == 4, …) in place of torch._check(x.sum().item() == 4)",
                )
            with program.graph.inserting_before(before):
                new_node = program.call(ops.CHECK, (condition, message), info(node), name="check")
            checks.append((Port(OutputRole.CHECK, new_node.name), new_node))
        program.graph.erase_node(node)
    for _, check in checks:
        _let_parts_be_checked(program, check.all_input_nodes[0])
    return checks


def _let_parts_be_checked(program: Program, condition: fx.Node) -> None:
    """Rewrite the whole-tensor reductions (`all`, `any`, `max`, `min`) that only a check reads as a sum or a maximum.

    Passes know how ranks that hold parts of the tensor compute these together.
    """
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
            reduction = _counted(program, node, x)
        elif x.meta["val"].is_floating_point():
            reduction = _extreme(program, node, x)
        else:
            continue
        node.replace_all_uses_with(reduction)
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
    """Replace `all` by a count of false elements that is 0, and `any` by a count of true elements that is not 0."""
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
    """Return the first node after the forward."""
    return next(
        (n for n in program.graph.nodes if n.op != "placeholder" and _phase(n) is not Phase.FORWARD),
        program.output_node(),
    )


def _phase(node: fx.Node) -> Phase | None:
    return None if node.op == "output" else info(node).phase

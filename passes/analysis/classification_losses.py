"""Finds the logits of a program, which a classification loss, log-probabilities or an entropy are computed from: by
torch's own operators, or by those that they are decomposed into.
"""

from __future__ import annotations

import torch
from torch import fx

from zgraph.passes.analysis.slices import PRODUCTS, elements
from zgraph.program import collectives
from zgraph.program.aliases import is_view
from zgraph.program.node import Phase, info, tensors
from zgraph.program.program import InputRole, OutputRole, Program

aten = torch.ops.aten

_NORMALISE = {aten._log_softmax.default, aten._softmax.default, aten.logsumexp.default}
# What may be between a difference and its exponential: a temperature, which Inductor divides by after the difference.
_SCALED = {
    aten.div.Tensor,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.where.self,
    torch.ops.prims.convert_element_type.default,
}
_OF_MAXIMA = {aten.where.self, aten.eq.Scalar, aten.abs.default}  # what replaces a maximum that is infinite


def weights_of(program: Program) -> set[fx.Node]:
    """Return a program's parameters, and the values that are computed from them alone."""
    weights = set(program.input_nodes(InputRole.PARAMETER).values())
    for node in program.graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and weights.issuperset(node.all_input_nodes):
            weights.add(node)
    return weights


def logits_of(program: Program) -> dict[fx.Node, fx.Node]:
    """Return the logits that the forward normalises, by the product with a weight that they come from.

    Nothing that is computed from such a product reads another matrix of weights: attention's scores, and what a router
    chooses experts by, are no logits.
    """
    weights = weights_of(program)
    inner = _read_by_matrices(program, weights)
    logits: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        if node.op != "call_function" or info(node).phase is not Phase.FORWARD:
            continue
        of = _normalised(node)
        product = _product(of, weights) if of is not None else None
        if of is not None and product is not None and product not in inner:
            logits.setdefault(product, of)
    return logits


def _normalised(node: fx.Node) -> fx.Node | None:
    """Return what a softmax, a log-softmax or the logarithm of a sum of exponentials is computed of, given its node;
    where it is decomposed, given the exponential of what its maximum is subtracted from. None for any other node.
    """
    if node.target in _NORMALISE:
        return node.args[0]  # type: ignore[return-value]
    stack = node.all_input_nodes if node.target is aten.exp.default else []
    while stack:
        node = stack.pop()
        if node.target in _SCALED:
            stack += node.all_input_nodes[-2:]  # (behind the condition, of a choice between two)
        elif node.target is aten.sub.Tensor and isinstance(node.args[1], fx.Node) and _is_maximum(node.args[1]):
            return node.all_input_nodes[0]
    return None


def _is_maximum(node: fx.Node) -> bool:
    """Return whether a value is a maximum, of all ranks or of one, with zeros where it is infinite."""
    stack = [node]
    while stack:
        node = stack.pop()
        if node.target is aten.amax.default:
            return True
        if is_view(node) or collectives.is_wait(node) or collectives.is_start(node) or node.target in _OF_MAXIMA:
            stack += node.all_input_nodes
    return False


def _product(logits: fx.Node, weights: set[fx.Node]) -> fx.Node | None:
    """Return the product with a weight that logits come from, through values that are as large; None if there is none."""
    size, stack, seen = elements(logits), [logits], {logits}
    while stack:
        node = stack.pop()
        if node.target in PRODUCTS:
            if not weights.isdisjoint(node.all_input_nodes):
                return node
            continue
        for operand in node.all_input_nodes:
            if operand.op == "call_function" and elements(operand) >= size and operand not in seen:
                seen.add(operand)
                stack.append(operand)
    return None


def _read_by_matrices(program: Program, weights: set[fx.Node]) -> set[fx.Node]:
    """Return the forward's values from which something is computed that reads a matrix of weights, or that is sent to
    the next stage.
    """
    inner = {node for port, node in program.output_items() if port.role is OutputRole.SENT}
    for node in reversed(program.graph.nodes):
        if node.op != "call_function" or info(node).phase is not Phase.FORWARD or node in weights:
            continue
        reads = any(o in weights and any(t.dim() > 1 for t in tensors(o)) for o in node.all_input_nodes)
        if reads or node in inner:
            inner.update(o for o in node.all_input_nodes if o not in weights)
    return inner

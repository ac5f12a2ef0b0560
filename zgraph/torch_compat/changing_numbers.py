"""Python numbers that a captured forward changes, kept out of its program.

Dynamo can take such a number (a counter that a hook adds to, a temperature that anneals) as an input of its graph, which then gives its new
value as an output. Here that graph is cut in two: what computes numbers from numbers, which runs in Python around the program, and the rest.
A number that meets a tensor in arithmetic comes into the program as a 0-dim tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

_ARITHMETIC = {
    operator.add, operator.sub, operator.mul, operator.truediv, operator.iadd, operator.isub, operator.imul, operator.itruediv,
    torch.add, torch.sub, torch.mul, torch.div,
}  # fmt: skip


class NumberInGraphError(Exception):
    """A number is used in the program as more than an operand of arithmetic (a size, an index)."""


@dataclass(frozen=True)
class ChangingNumbers:
    """The half of a graph that computes numbers."""

    given: list[int]  # the flat inputs of the whole graph that `module` takes
    tensors: list[int]  # the flat inputs of the whole graph that the program takes
    # the form of each number that the program takes as a 0-dim tensor, after its tensors
    into: list[tuple[torch.dtype, torch.device]]
    # for each flat output: whether it is a number, and its position among the numbers' or the program's outputs
    outputs: list[tuple[bool, int]]
    module: fx.GraphModule  # gives the numbers among the outputs, then those that the program takes

    def inputs(self, flat: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return (the program's inputs, the numbers among the outputs) for the whole graph's inputs."""
        numbers = list(self.module(*(flat[i] for i in self.given)))
        count = len(numbers) - len(self.into)
        into = [torch.tensor(v, dtype=d, device=at) for v, (d, at) in zip(numbers[count:], self.into, strict=True)]
        return [*(flat[i] for i in self.tensors), *into], numbers[:count]

    def around(self, program: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        """Return a function of the whole graph's inputs that runs `program` on the tensors among them."""

        def run(*flat: Any) -> Sequence[Any]:
            given, numbers = self.inputs(flat)
            results = program(*given)
            return [numbers[at] if number else results[at] for number, at in self.outputs]

        return run


def split_numbers(graph_module: fx.GraphModule, fake_mode: Any) -> tuple[fx.GraphModule, ChangingNumbers | None]:
    """Return (the graph without its Python numbers, the `ChangingNumbers` that compute these; None if it has none).

    Raises `NumberInGraphError` for a number that is used other than as an operand of arithmetic.
    """
    graph = graph_module.graph
    numbers = _numbers(graph)
    if not numbers:
        return graph_module, None
    placeholders = graph.find_nodes(op="placeholder")
    outputs: Any = graph.output_node().args[0]
    scalar, tensor = fx.Graph(), fx.Graph()
    scalar_memo: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node in numbers:
            scalar_memo[node] = scalar.node_copy(node, lambda n: scalar_memo[n])
    tensor_memo: dict[fx.Node, fx.Node] = {}
    for node in placeholders:
        if node not in numbers:
            tensor_memo[node] = _copied(tensor, node, tensor_memo)
    into = _operands(graph, numbers)
    for (number, dtype, device), users in into.items():
        placeholder = tensor.placeholder(f"number_{number.name}_{len(tensor.nodes)}")
        with fake_mode:
            placeholder.meta["example_value"] = torch.empty((), dtype=dtype, device=device)
        for user in users:
            tensor_memo[_Use(user, number)] = placeholder  # type: ignore[index]
    for node in graph.nodes:
        if node not in numbers and node.op not in ("placeholder", "output"):
            tensor_memo[node] = _copied(tensor, node, tensor_memo)
    wanted = [n for n in outputs if isinstance(n, fx.Node) and n in numbers]
    scalar.output(tuple([scalar_memo[n] for n in wanted] + [scalar_memo[n] for n, _, _ in into]))
    rest = [n for n in outputs if not (isinstance(n, fx.Node) and n in numbers)]
    tensor.output(tuple(tensor_memo[n] if isinstance(n, fx.Node) else n for n in rest))
    order: list[tuple[bool, int]] = []
    for item in outputs:
        is_number = isinstance(item, fx.Node) and item in numbers
        order.append((is_number, sum(known == is_number for known, _ in order)))
    return fx.GraphModule(graph_module, tensor), ChangingNumbers(
        given=[i for i, n in enumerate(placeholders) if n in numbers],
        tensors=[i for i, n in enumerate(placeholders) if n not in numbers],
        into=[(dtype, device) for _, dtype, device in into],
        outputs=order,
        module=fx.GraphModule(torch.nn.Module(), scalar),
    )


@dataclass(frozen=True)
class _Use:
    user: fx.Node  # the node that reads the number
    number: fx.Node  # the node that computes the number


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def _known(item: fx.Node) -> bool:
    """Return whether dynamo knows the number that this `.item()` gives: it does for the tensors it makes of floats, not
    for the model's."""
    number = item.meta.get("example_value")
    return not isinstance(number, torch.SymFloat) or bool(number.node.has_hint())


def _numbers(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that are computed from the number inputs alone, these included."""
    numbers: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "output":
            continue
        value = node.meta.get("example_value")
        if node.op == "placeholder":
            items = node.users and all(u.op == "call_method" and u.target == "item" for u in node.users)
            scalar = isinstance(value, torch.Tensor) and value.dim() == 0 and value.dtype is torch.float64
            if _is_number(value) or (items and scalar and not value.requires_grad and all(map(_known, node.users))):
                numbers.add(node)
        elif node.all_input_nodes and all(n in numbers for n in node.all_input_nodes):
            handed = node.target is torch.scalar_tensor and all(u.op == "output" for u in node.users)
            if _is_number(value) or handed:  # (a float leaves dynamo's graph as a tensor)
                numbers.add(node)
    return numbers


def _operands(graph: fx.Graph, numbers: set[fx.Node]) -> dict[tuple[fx.Node, torch.dtype, torch.device], list[fx.Node]]:
    """Return the nodes where a number meets a tensor, by the number and the dtype and device that it needs there.

    Raises `NumberInGraphError` for any other use of a number.
    """
    operands: dict[tuple[fx.Node, torch.dtype, torch.device], list[fx.Node]] = {}
    for node in graph.nodes:
        number_inputs = [n for n in node.all_input_nodes if n in numbers]
        if node in numbers or node.op == "output" or not number_inputs:
            continue
        others = [a for a in node.args if isinstance(a, fx.Node) and a not in numbers]
        if node.target not in _ARITHMETIC or node.kwargs or len(node.args) != 2 or len(others) != 1:
            raise NumberInGraphError(f"{number_inputs[0].name} in {node.format_node()}")
        value, result = others[0].meta["example_value"], node.meta["example_value"]
        whole = isinstance(number_inputs[0].meta["example_value"], (int, torch.SymInt))
        dtype = torch.int64 if whole else torch.float64
        if value.dim() == 0:  # (beside a 0-dim tensor, another one takes part in type promotion, unlike a number)
            dtype = value.dtype if whole or value.is_floating_point() else torch.get_default_dtype()
        like = torch.empty((), dtype=dtype, device="meta")
        plain = torch.empty((1,) * value.dim(), dtype=value.dtype, device="meta")
        if (
            node.target not in (operator.truediv, torch.div, operator.itruediv)
            and torch.result_type(plain, like) != result.dtype
        ):
            raise NumberInGraphError(f"{number_inputs[0].name} in {node.format_node()}")
        operands.setdefault((number_inputs[0], dtype, value.device), []).append(node)
    return operands


def _copied(graph: fx.Graph, node: fx.Node, copies: dict[Any, fx.Node]) -> fx.Node:
    copy = graph.node_copy(node, lambda n: copies[_Use(node, n)] if _Use(node, n) in copies else copies[n])
    copy.meta = dict(node.meta)
    return copy

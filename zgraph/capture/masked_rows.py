"""Selections by a mask whose size is known, because what is added to the selected rows, or put in their place, has as many.

AOTAutograd gives each selection (`x[mask]`) a size that depends on values, and notes what it must be equal to. Such a
selection becomes one operator that is given its size (`zgraph.program.masked_rows`), so that all that is computed of it
has sizes that are numbers, or arithmetic on the sizes of inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from zgraph.program import sizes
from zgraph.program.masked_rows import MASKED_ROWS
from zgraph.torch_compat import fake_tensors, symbols

aten = torch.ops.aten


def give_known_sizes(graph: fx.Graph) -> None:
    """Make each selection whose size is known an operator that is given it."""
    for node in graph.find_nodes(op="call_function", target=aten.index.Tensor):
        dim = masked_dim(node)
        value = node.meta["val"]
        if dim is None or symbols.has_unknown(value):
            continue
        mask = node.args[1][dim]
        rows = sizes.with_nodes(graph, value.shape[dim])
        node.target, node.args = MASKED_ROWS, (node.args[0], mask, dim, rows)
        node.meta["val"] = _dense(value, list(value.shape))
        node.meta.pop("unbacked_bindings", None)  # (Inductor looks for the operator that gives each of these)


def masked_dim(node: fx.Node) -> int | None:
    """Return the first of the dimensions that a node indexes by one mask alone; None for any other node."""
    if node.target is not aten.index.Tensor:
        return None
    indices: Any = node.args[1]
    used = [dim for dim, index in enumerate(indices) if index is not None]
    one = len(used) == 1 and indices[used[0]].meta["val"].dtype is torch.bool
    return used[0] if one else None


def _dense(value: torch.Tensor, shape: list[Any]) -> torch.Tensor:
    with value.fake_mode:  # type: ignore[attr-defined]
        return torch.empty(shape, dtype=value.dtype, device=value.device)


def forget_assumptions(graph: fx.Graph) -> None:
    """Remove the assertions of sizes that are known: the operators check their own."""
    for node in graph.find_nodes(op="call_function", target=aten._assert_scalar.default):
        condition = node.args[0]
        if not isinstance(condition, fx.Node) or not symbols.has_unknown(condition.meta.get("val")):
            graph.erase_node(node)


def settle(graph: fx.Graph) -> None:
    """Give all values of a program whose sizes are numbers, and that only had symbols because they are computed of such
    selections, sizes that are numbers."""
    settled: set[fx.Node] = set()
    for node in list(graph.nodes):
        value = node.meta.get("val")
        of_known = node.target is MASKED_ROWS or not settled.isdisjoint(node.all_input_nodes)
        if not of_known or not symbols.has_symbol(value) or symbols.has_unknown(value):
            continue
        if any(symbols.has_symbol(n.meta.get("val")) for n in node.all_input_nodes):
            continue
        if isinstance(value, torch.SymInt):
            for user in list(node.users):
                sizes.replace_number(user, node, symbols.expression(value))
            graph.erase_node(node)
        elif not symbols.is_symbolic(value):
            settled.add(node)
            node.meta["val"] = _numbered(value)


def _numbered(value: Any) -> Any:
    """Return a value whose sizes are numbers with sizes that are no symbols."""
    if isinstance(value, (tuple, list)):
        return type(value)(_numbered(one) for one in value)
    if not isinstance(value, torch.Tensor):
        return value
    size, stride = ([symbols.expression(n) for n in numbers] for numbers in (value.shape, value.stride()))
    return fake_tensors.empty(value.fake_mode, size, stride, value.dtype, value.device)  # type: ignore[attr-defined]

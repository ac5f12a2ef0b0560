"""Bound sizes by the tables that a model looks positions up in: a sequence is no longer than a table of positions.

Torch bounds a size where a table is sliced, not where positions 0, 1, 2, … are its indices: an index beyond the table
fails when the program runs. Only indices that are certainly reached count: those computed of a count alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zgraph.errors import CaptureError
from zgraph.program.counting import COUNTS, start_and_step
from zgraph.program.node import info
from zgraph.program.sizes import static
from zgraph.torch_compat import symbols

aten, prims = torch.ops.aten, torch.ops.prims

_SAME_VALUES = {
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.expand.default,
    aten.permute.default,
    aten.repeat.default,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten.reshape.default,
    aten._to_copy.default,
    aten._unsafe_view.default,
    prims.convert_element_type.default,
}
"""Operators whose result has every value of their first argument, and no other."""


@dataclass(frozen=True)
class TableBound:
    """The largest value of a size for which every position is in the table."""

    most: int  # the largest value
    where: str | None  # the user's line that looks positions up


def table_bounds(graph: fx.Graph, names: Mapping[Any, str]) -> dict[str, TableBound]:
    """Return the bounds of sizes by tables, by the sizes' names: the smallest of each. `names` are those of symbols.

    Indices that depend on several sizes, or on one in another way than by a factor and a sum, bound none.
    """
    bounds: dict[str, TableBound] = {}
    for node, rows, largest in _lookups(graph):
        free = set() if isinstance(largest, int) else largest.free_symbols
        if len(free) != 1 or not free <= names.keys():
            continue
        (symbol,) = free
        line = symbols.line_of(largest, symbol)
        if line is None or line[0] <= 0:
            continue
        most = (rows - 1 - line[1]) // line[0]
        name = names[symbol]
        if name not in bounds or most < bounds[name].most:
            bounds[name] = TableBound(most, info(node).source or None)
    return bounds


def refuse_beyond_table(size: int, table: TableBound) -> None:
    """Raise `CaptureError` where positions of this size are not all in the table."""
    if size > table.most:
        raise CaptureError(
            f"at a size of {size} the model looks up positions that its table does not have",
            where=table.where,
            why=f"the table is enough for {table.most}",
            hint="cut the batch, or enlarge the table",
        )


def refuse_beyond_tables(graph: fx.Graph) -> None:
    """Raise `CaptureError` where a program of fixed sizes looks up a position that its table does not have."""
    for node, rows, largest in _lookups(graph):
        if isinstance(largest, int) and largest >= rows:
            raise CaptureError(
                f"the model looks up row {largest} of a table that has {rows} rows",
                where=info(node).source or None,
                why="it counts positions from the size of an input",
                hint="cut the batch, or enlarge the table",
            )


def _lookups(graph: fx.Graph) -> Iterator[tuple[fx.Node, int, Any]]:
    """Yield (a node that reads rows of a table, the number of rows, the largest index, as a number or an expression)
    where the indices are counted."""
    largest: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        value = _largest(node, largest)
        if value is not None:
            largest[node] = value
        for table, dim, indices in _tables(node):
            shape = table.meta["val"].shape or (1,)  # (a number is looked up as a table of one row)
            if indices in largest and isinstance(shape[dim], int):
                yield node, shape[dim], largest[indices]


def _tables(node: fx.Node) -> Iterator[tuple[fx.Node, int, fx.Node]]:
    """Yield (table, dimension, indices) of what an operator looks up."""
    args: Any = node.args
    if node.target is aten.embedding.default:
        yield args[0], 0, args[1]
    elif node.target is aten.index_select.default:
        yield args[0], args[1], args[2]
    elif node.target is aten.index.Tensor:
        yield from ((args[0], dim, indices) for dim, indices in enumerate(args[1]) if indices is not None)


def _largest(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """Return the largest value of a node whose values are counted, as a number or an expression; None of another."""
    args: Any = node.args
    if node.target in COUNTS:
        start, step = start_and_step(node)
        length = symbols.expression(node.meta["val"].shape[0])
        if not isinstance(start, int) or not isinstance(step, int) or step <= 0 or length == 0:
            return None
        return start + step * (length - 1)
    first, value = (args[0] if args else None), node.meta.get("val")
    if not isinstance(first, fx.Node) or first not in known or not _is_integral(value):
        return None
    if node.target in _SAME_VALUES:
        return known[first]
    if node.target in (aten.add.Tensor, aten.sub.Tensor) and isinstance(args[1], int) and not node.kwargs:
        return known[first] + (args[1] if node.target is aten.add.Tensor else -args[1])
    return None


def _is_integral(value: Any) -> bool:
    """Return whether a value is a tensor of whole numbers that has elements."""
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.int32, torch.int64):
        return False
    return all(static(size) != 0 for size in value.shape)

"""Gradients of the rows of a table are added to its other gradient, not to zeros first.

    total = gradient + put(zeros, rows, values)   ->   total = put(gradient, rows, values)     # `put` adds to rows

*Contract.* A table that a model looks up and multiplies by as well (tied embeddings), or looks up twice, has a gradient
of each use. That of a lookup is as large as the table, zeros for the most part: it need not be made, filled, read and
added. Rows that occur several times are added one after another to the other gradient, not to each other first, so sums
differ by rounding: a small value added to a large one is lost in part. Therefore only in float32 and float64, and only
where the rows have no more elements than the table, so that few occur often; with more, zeros are the least of the work,
and the rows would be kept until the other gradient is there. What is nothing but rows of other lookups is always added to.
"""

from __future__ import annotations

import torch
from torch import fx

from zgraph.passes.contract import graph_pass
from zgraph.program.layout import has_strides, promised
from zgraph.program.node import Phase, info, tensor
from zgraph.program.program import Fact, Program
from zgraph.program.sizes import largest

aten = torch.ops.aten

_PUTS = (aten.index_put.default, aten._unsafe_index_put.default)  # which add where a fourth argument says so
_MASKED = aten._unsafe_masked_index_put_accumulate.default  # which always adds
_EXACT = (torch.float32, torch.float64)


@graph_pass(
    "add_rows",
    "gradients of a table's rows are added to its other gradient, without a table of zeros",
    requires=(Fact.CLEAN,),
    conflicts=(Fact.SHARDED,),
    bitwise=False,
)
def add_rows(program: Program) -> dict[str, int]:
    added = 0
    for node in program.nodes:
        if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs or not _in_backward(node):
            continue
        pairs: tuple[tuple[fx.Node, fx.Node], ...] = (node.args, node.args[::-1])  # type: ignore[assignment]
        for other, rows in pairs:
            if _is_alone(rows) and _alike(other, rows, node) and _is_exact(other, rows):
                with program.graph.inserting_before(node):
                    record = info(rows).replace(made_by="add_rows")
                    total = program.call(rows.target, (other, *rows.args[1:]), record, name=node.name)
                node.replace_all_uses_with(total)
                added += 1
                break
    program.graph.eliminate_dead_code()
    return {"added": added}


def _in_backward(node: fx.Node) -> bool:
    return info(node).phase is Phase.BACKWARD


def _is_alone(node: object) -> bool:
    """Return whether this adds to rows of zeros in the backward, and is read once."""
    if not isinstance(node, fx.Node) or not _in_backward(node):
        return False
    zeros = node.args[0] if _adds_rows(node) else None
    if not isinstance(zeros, fx.Node) or node.kwargs or len(node.users) != 1:
        return False
    return _is_zeros(zeros)


def _adds_rows(node: fx.Node) -> bool:
    return node.target is _MASKED or (node.target in _PUTS and len(node.args) == 4 and node.args[3] is True)


def _is_zeros(node: fx.Node) -> bool:
    fill = node.args[1] if node.target is aten.full.default else None
    return isinstance(fill, (int, float)) and fill == 0


def _alike(other: object, rows: fx.Node, total: fx.Node) -> bool:
    """Return whether a gradient can take the place of zeros: all three have the same sizes, strides and exact dtype."""
    strides, wanted = promised(total), tensor(total)
    if not isinstance(other, fx.Node) or wanted.dtype not in _EXACT or strides is None:
        return False
    same = all(tensor(n).dtype is wanted.dtype and tensor(n).shape == wanted.shape for n in (other, rows))
    return same and has_strides(tensor(other), strides)


def _is_exact(other: fx.Node, rows: fx.Node) -> bool:
    """Return whether the rows are few beside the table, or the other gradient is nothing but rows of lookups."""
    base = other
    while _adds_rows(base):
        base = base.args[0]  # type: ignore[assignment]
    values = rows.args[3 if rows.target is _MASKED else 2]
    assert isinstance(values, fx.Node)
    return _is_zeros(base) or largest(tensor(values).numel()) <= largest(tensor(rows).numel())

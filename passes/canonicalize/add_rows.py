"""Gradients of the rows of a table are added to its other gradient, not to zeros first.

    total = gradient + put(zeros, rows, values)   ->   total = put(gradient, rows, values)     # `put` adds to rows

*Contract.* A table that a model looks up and multiplies by as well (tied embeddings), or looks up twice, has a gradient
of each use. That of a lookup is as large as the table, zeros for the most part: it need not be made, filled, read and
added. Rows that occur several times are added one after another to the other gradient, not to each other first, so sums
differ by rounding; therefore only in float32 and float64, where they are as exact, and not in fewer bits, where a small
value added to a large one is lost.
"""

from __future__ import annotations

import torch
from torch import fx

from zgraph.passes.contract import graph_pass
from zgraph.program.layout import has_strides, promised
from zgraph.program.node import Phase, info, tensor
from zgraph.program.program import Fact, Program

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
            if _is_alone(rows) and _alike(other, rows, node):
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
    adds = node.target is _MASKED or (node.target in _PUTS and len(node.args) == 4 and node.args[3] is True)
    zeros = node.args[0] if adds else None
    if not isinstance(zeros, fx.Node) or node.kwargs or len(node.users) != 1:
        return False
    fill = zeros.args[1] if zeros.target is aten.full.default else None
    return isinstance(fill, (int, float)) and fill == 0


def _alike(other: object, rows: fx.Node, total: fx.Node) -> bool:
    """Return whether a gradient can take the place of zeros: all three have the same sizes, strides and exact dtype."""
    if not isinstance(other, fx.Node) or tensor(total).dtype not in _EXACT:
        return False
    strides, wanted = promised(total), tensor(total)
    same = all(tensor(n).dtype is wanted.dtype and tensor(n).shape == wanted.shape for n in (other, rows))
    return same and strides is not None and has_strides(tensor(other), strides)

"""Masks of attention are computed once where queries, keys, heads or rows of a batch have the same.

    mask = where(expand(shown, [4, 1, 512, 512]), 0, -inf)   ->   mask = where(shown, 0, -inf)     # shown: bool[4, 1, 1, 512]

*Contract.* A mask that hides padding says the same to all queries, and is captured with one row for each, as large as the scores; attention
takes it with a single one. Element by element an operator gives equal results for equal operands, so it is computed of the operands
before they were expanded; and positions, which begin at 0 and count up, are never below 0 (what transformers' bidirectional masks ask). The
values that attention adds, and so its results, are the same bit for bit. Safe for torch's attention on CPUs and for sparse attention,
which take a mask with 1 in the place of any of its sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from zgraph.passes.contract import graph_pass
from zgraph.program import cpu_attention
from zgraph.program.aliases import is_cast, is_random
from zgraph.program.node import info, tensor
from zgraph.program.program import Fact, Program
from zgraph.program.sparse_attention import SPARSE, SPARSE_BACKWARD

aten = torch.ops.aten

_ATTENTIONS = (cpu_attention.FORWARD, cpu_attention.BACKWARD, SPARSE, SPARSE_BACKWARD)
_COPIES = (aten.clone.default, aten.contiguous.default)
_FILLS = {aten.full.default: 0, aten.zeros.default: 0, aten.ones.default: 0}  # and which argument is the size
_VIEWS = (aten.unsqueeze.default, aten.expand.default, aten.view.default, aten._unsafe_view.default, *_COPIES)


@graph_pass(
    "compact_masks",
    "masks of attention are computed once where queries, keys, heads or rows have the same",
    requires=(Fact.CLEAN,),
)
def compact_masks(program: Program) -> dict[str, int]:
    masks, replaced = _Masks(program), set()
    for node in program.nodes:
        if node.target not in _ATTENTIONS:
            continue
        at = [a.name for a in node.target._schema.arguments].index("attn_mask")  # type: ignore[union-attr]
        mask = node.args[at] if at < len(node.args) else node.kwargs.get("attn_mask")
        if isinstance(mask, fx.Node) and (compact := masks.compact(mask)) is not mask:
            if at < len(node.args):
                node.update_arg(at, compact)
            else:
                node.update_kwarg("attn_mask", compact)
            replaced.add(mask)
    if replaced:
        program.graph.eliminate_dead_code()
    return {"masks": len(replaced)}


class _Masks:
    """Values with 1 in the place of the sizes along which all of their elements are the same."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._compact: dict[fx.Node, fx.Node] = {}

    def compact(self, node: fx.Node) -> fx.Node:
        """Return a node with the same elements, of as many dimensions; the node itself, where nothing is known to be the same."""
        if node not in self._compact:
            self._compact[node] = self._made(node) or node
        return self._compact[node]

    def _made(self, node: fx.Node) -> fx.Node | None:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor) or _is_single(node):
            return None
        if node.target is aten.ge.Scalar and _is_known_position(node.args[0], node.args[1]):
            kwargs = {"dtype": torch.bool, "device": tensor(node).device}
            return self._call(node, aten.full.default, ([1] * tensor(node).dim(), True), kwargs)
        if node.target in _FILLS:
            at = _FILLS[node.target]
            args = (*node.args[:at], [1] * tensor(node).dim(), *node.args[at + 1 :])
            return self._call(node, node.target, args, dict(node.kwargs))
        if node.target is aten.expand.default:
            (operand,) = node.all_input_nodes[:1]
            inner = self.compact(operand)
            return self._with_dimensions(node, inner)
        if node.target is aten.unsqueeze.default or _is_elementwise(node):
            return self._of_compact(node)
        return None

    def _of_compact(self, node: fx.Node) -> fx.Node | None:
        """Return the same operator of compact operands, None if none is smaller."""
        operands = {operand: self.compact(operand) for operand in node.all_input_nodes}
        if all(operand is compact for operand, compact in operands.items()):
            return None
        args: Any = fx.node.map_arg(node.args, operands.__getitem__)
        kwargs: Any = fx.node.map_arg(node.kwargs, operands.__getitem__)
        return self._call(node, node.target, args, dict(kwargs))

    def _with_dimensions(self, node: fx.Node, inner: fx.Node) -> fx.Node:
        """Return the operand of an expansion with the dimensions that it adds, of size 1."""
        added = tensor(node).dim() - tensor(inner).dim()
        for _ in range(added):
            inner = self._call(node, aten.unsqueeze.default, (inner, 0), {})
        return inner

    def _call(self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        with self.program.graph.inserting_before(node):
            return self.program.call(target, args, info(node), name=f"{node.name}_compact", kwargs=kwargs)


def _is_single(node: fx.Node) -> bool:
    """Return whether a value has sizes of 1 alone, already."""
    return all(isinstance(size, int) and size == 1 for size in tensor(node).shape)


def _is_elementwise(node: fx.Node) -> bool:
    """Return whether each element of a result depends on the elements of the operands at its place alone."""
    pointwise = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
    return (pointwise or is_cast(node) or node.target in _COPIES) and not is_random(node)


def _is_known_position(node: Any, least: Any) -> bool:
    """Return whether a value is at least `least`, since it has positions that count up from a number.

    (They are of 64 bits, to which no large number is added: others wrap around.)
    """
    while isinstance(node, fx.Node) and node.op == "call_function" and tensor(node).dtype is torch.int64:
        if node.target is aten.arange.default:
            return isinstance(least, int) and least <= 0
        if node.target is aten.arange.start:
            return all(isinstance(x, int) for x in (least, node.args[0])) and node.args[0] >= least  # type: ignore[operator]
        if node.target is aten.add.Tensor and _is_small(node.args[1]) and _is_small(least) and not node.kwargs:
            least = least - node.args[1]
        elif node.target not in _VIEWS:
            return False
        node = node.args[0]
    return False


def _is_small(number: Any) -> bool:
    return isinstance(number, int) and abs(number) < 2**31

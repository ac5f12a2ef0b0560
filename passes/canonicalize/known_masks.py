"""Masks of attention that are known before anything runs: those that show everything are left out, and causal ones
become `is_causal`.

*Contract.* A mask is known if it is computed from constants alone (positions, fills): transformers makes such a mask
for every model, whatever its batch. The pass computes it, some rows at a time where the rules of its operators let it,
and looks at each of its elements; a mask that neither shows everything nor is causal stays as it is. Without the mask
attention rounds otherwise, takes half the time, and can be computed by a ring. The pass looks at operators that have an
argument `attn_mask`: those of the CPU, and sparse ones, where a mask has to hide by -inf (by any other number, a query
that sees no key but hidden ones would see all of them). (On CUDA a mask chooses another operator than attention without.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from zgraph.passes.analysis.axes import Axes, Axis
from zgraph.passes.analysis.slices import elements, rows_of, sliced
from zgraph.passes.contract import graph_pass
from zgraph.passes.spmd.local_sizes import SIZES
from zgraph.program import cpu_attention
from zgraph.program.aliases import is_random
from zgraph.program.node import tensor
from zgraph.program.program import Fact, Program
from zgraph.program.remark import Remark
from zgraph.program.sparse_attention import SPARSE, SPARSE_BACKWARD

aten = torch.ops.aten

# The positions of the queries and keys among an operator's arguments.
_READ: dict[object, tuple[int, int]] = {
    cpu_attention.FORWARD: (0, 1),
    cpu_attention.BACKWARD: (1, 2),
    SPARSE: (0, 1),
    SPARSE_BACKWARD: (1, 2),
}
_SPARSE = (SPARSE, SPARSE_BACKWARD)

AT_ONCE = 2**24
"""The number of elements of a mask's rows that are computed at once."""
WHOLE = 2**28
"""The most elements of a value that can't be computed by rows."""
LARGEST = 2**34
"""The most elements of a mask that is looked at: that of 128k tokens takes minutes."""


@graph_pass(
    "known_masks",
    "masks of attention that show everything, or what is before each query, are no longer computed",
    requires=(Fact.CLEAN,),
    bitwise=False,
)
def known_masks(program: Program) -> dict[str, int]:
    counts = {"causal": 0, "none": 0}
    kinds: dict[tuple[fx.Node, bool], str | None] = {}
    for node in program.nodes:
        mask = _mask_of(node) if node.target in _READ else None
        if mask is None:
            continue
        key = (mask, node.target in _SPARSE)
        if key not in kinds:
            kinds[key] = _kind(program, *key)
        kind = kinds[key]
        sizes = tuple(tensor(node.args[at]).shape[-2] for at in _READ[node.target])  # type: ignore[arg-type]
        if kind is None or (kind == "causal" and tensor(mask).shape[-2:] != sizes):
            continue
        if node.target in _SPARSE:
            node.update_arg(_argument(node, "attn_mask"), None)
        else:
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "attn_mask"}
        if kind == "causal":
            arguments = node.target._schema.arguments  # type: ignore[union-attr]
            at = _argument(node, "is_causal")
            defaults = [a.default_value for a in arguments[len(node.args) : at]]
            node.args = (*node.args[:at], *defaults, True, *node.args[at + 1 :])
        counts[kind] += 1
    if any(counts.values()):
        program.graph.eliminate_dead_code()
    return counts


def _argument(node: fx.Node, name: str) -> int:
    return [a.name for a in node.target._schema.arguments].index(name)  # type: ignore[union-attr]


def _mask_of(node: fx.Node) -> fx.Node | None:
    """Return the mask of an attention; None if it has none."""
    mask = node.args[_argument(node, "attn_mask")] if node.target in _SPARSE else node.kwargs.get("attn_mask")
    return mask if isinstance(mask, fx.Node) else None


def _kind(program: Program, mask: fx.Node, infinite: bool) -> str | None:
    """Return "causal" for a mask that hides from each query the keys behind it, "none" for one that shows everything,
    else None. With `infinite` a mask has to hide by -inf.
    """
    ancestors = _made_of(mask)
    if ancestors is None or tensor(mask).dim() < 2 or not 0 < tensor(mask).numel() <= LARGEST:
        return None
    queries, keys = tensor(mask).shape[-2:]
    kinds = {"none"} | ({"causal"} if queries == keys else set())
    try:
        for first, rows in _rows(program, mask, sorted(ancestors)):
            seen = _shown(rows, infinite)
            before = torch.arange(keys) <= torch.arange(first, first + rows.shape[-2]).unsqueeze(1)
            if seen is None or not seen.all():
                kinds.discard("none")
            if seen is None or not (seen == before).all():
                kinds.discard("causal")
            if not kinds:
                return None
    except _TooLarge:
        what = f"a mask of {queries} x {keys} is computed, and is not looked at"
        why = f"it is made of constants, but not row by row, of more than {WHOLE} elements"
        program.remarks.append(
            Remark("known_masks", mask.name, what, why, 0.0, "is_causal=True, if that is what it is")
        )
        return None
    return max(kinds)  # (one query that sees its only key is both)


def _made_of(mask: fx.Node) -> set[fx.Node] | None:
    """Return the nodes that a mask is computed from; None if one of them is an input or random."""
    ancestors: set[fx.Node] = set()
    stack = [mask]
    while stack:
        node = stack.pop()
        if node.op != "call_function" or is_random(node):
            return None
        if node not in ancestors:
            ancestors.add(node)
            stack += node.all_input_nodes
    return ancestors


def _shown(rows: torch.Tensor, infinite: bool) -> torch.Tensor | None:
    """Return which keys a mask shows, as booleans; None if it does more than show or hide."""
    if rows.dtype is torch.bool:
        return rows
    if not rows.is_floating_point():
        return None
    shown = rows == 0
    hidden = rows <= (-torch.inf if infinite else torch.finfo(rows.dtype).min)
    return shown if bool((shown | hidden).all()) else None


def _rows(program: Program, mask: fx.Node, nodes: list[fx.Node]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield a mask's rows, some at a time, each time with the index of the first of them. Raises `_TooLarge`."""
    axes = Axes(program, nodes)
    dims = axes.shape(mask)[-2]
    queries = tensor(mask).shape[-2]
    shapes = [dim for n in nodes for shape in axes.shapes(n) for dim in shape]
    if len(dims) != 1 or any(dims[0] in dim and len(dim) != 1 for dim in shapes):
        yield 0, _Values(axes, None).value(mask, None, {})
        return
    values = _Values(axes, dims[0])
    step = max(1, AT_ONCE * queries // tensor(mask).numel())
    for first in range(0, queries, step):
        yield first, values.value(mask, (first, min(first + step, queries)), {})


class _TooLarge(Exception):
    """A value of too many elements to be computed whole."""


class _Values:
    """The values of constant nodes, computed on the CPU: whole, or some of the rows along an axis."""

    def __init__(self, axes: Axes, axis: Axis | None) -> None:
        self.axes, self.axis = axes, axis
        self.whole: dict[fx.Node, Any] = {}

    def value(self, node: fx.Node, rows: tuple[int, int] | None, now: dict[fx.Node, Any]) -> Any:
        """Return a node's value, whole or these rows of it; `now` are the rows that were computed before. Raises
        `_TooLarge`.
        """
        if rows is None or self.axis is None or not rows_of(self.axes, node, self.axis):
            if node not in self.whole:
                if elements(node) > WHOLE:
                    raise _TooLarge
                self.whole[node] = self._made(node, None, now)
            return self.whole[node]
        if node not in now:
            filled = node.target in SIZES and not node.all_input_nodes
            if filled or (node.all_input_nodes and sliced(self.axes, node, self.axis) == (True,)):
                now[node] = self._made(node, rows, now)
            else:
                dim = next(d for d, dim in enumerate(self.axes.shape(node)) if self.axis in dim)
                now[node] = self.value(node, None, now).narrow(dim, rows[0], rows[1] - rows[0])
        return now[node]

    def _made(self, node: fx.Node, rows: tuple[int, int] | None, now: dict[fx.Node, Any]) -> Any:
        given = {o: self.value(o, rows, now) for o in node.all_input_nodes}
        args: Any = fx.node.map_arg(node.args, given.__getitem__)
        kwargs: Any = dict(fx.node.map_arg(node.kwargs, given.__getitem__))  # type: ignore[call-overload]
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        at = SIZES.get(node.target)
        if at is not None and rows is not None:
            sizes = zip(tensor(node).shape, self.axes.shape(node), strict=True)
            args = (*args[:at], [rows[1] - rows[0] if self.axis in dim else n for n, dim in sizes], *args[at + 1 :])
        return node.target(*args, **kwargs)  # type: ignore[operator]

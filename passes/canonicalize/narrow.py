"""Rows of logits that a loss leaves out are left out before the product that gives the logits.

    logits = product(x, w)[:, :-1]        ->   logits = product(x[:, :-1], w)

In the backward, where the gradient of the logits is padded with rows of zeros, the sums over rows leave these rows out,
and the gradient of x is padded instead. So the loss and its product have the same rows, and both can run in chunks
(`zgraph.passes.tiling.tile`). Safe because each row of a product depends on one row of x alone, and because zeros add
nothing to a sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from zgraph.passes.analysis.classification_losses import logits_of
from zgraph.passes.contract import graph_pass
from zgraph.passes.spmd.sharding_rules import argument
from zgraph.program.aliases import is_cast
from zgraph.program.node import Phase, info, sequence, tensor
from zgraph.program.program import Fact, Program

aten = torch.ops.aten
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default}
_PERMUTATIONS = {aten.t.default, aten.permute.default, aten.transpose.int}
_FILLS = {aten.slice_backward.default, aten.slice_scatter.default}


def _product(node: fx.Node) -> bool:
    """Return whether this is a product whose rows can be left out in its operand. (An added matrix could have a row for
    each of the product's.)
    """
    if node.target is aten.addmm.default:
        return not node.kwargs and tensor(node.args[0]).dim() == 1  # type: ignore[arg-type]
    return node.target is aten.mm.default


@graph_pass(
    "narrow",
    "rows that a loss leaves out are left out before the logits",
    requires=(Fact.CLEAN,),
    provides=(Fact.NARROWED,),
    conflicts=(Fact.SHARDED, Fact.DIVIDED),
    bitwise=False,
)
def narrow(program: Program) -> dict[str, int]:
    products = logits_of(program)
    counts = {"forward": 0, "backward": 0}
    for node in program.nodes:
        if node in products and _product(node):
            narrowed = _Narrowed(program, node)
            counts["forward"] += narrowed.forward()
            counts["backward"] += narrowed.backward()
    program.graph.eliminate_dead_code()
    return counts


def _of_forward(node: fx.Node) -> bool:
    return node.op == "call_function" and info(node).phase is Phase.FORWARD


class _Narrowed:
    """One product, and the slices that cut its rows."""

    def __init__(self, program: Program, product: fx.Node) -> None:
        self.program, self.product = program, product
        self.rows: fx.Node = product.args[-2]  # type: ignore[assignment]
        self.cuts: list[fx.Node] = []
        self.casts: list[fx.Node] = []
        self.node = product  # the value that the loss reads

    def forward(self) -> int:
        classes = tensor(self.product).shape[-1]
        while len(self.node.users) == 1:
            (user,) = self.node.users
            shape = tensor(user).shape if _of_forward(user) and isinstance(user.meta.get("val"), torch.Tensor) else ()
            if not shape or shape[-1] != classes:
                break
            if is_cast(user):
                self.casts.append(user)
            elif user.target is aten.slice.Tensor and _dim(user) < len(shape) - 1 and argument(user, 4, 1) == 1:
                self.cuts += [user] if shape != tensor(self.node).shape else []
            elif user.target not in _VIEWS:
                break
            self.node = user
        if not self.cuts:
            return 0
        with self.program.graph.inserting_before(self.product):
            rows = self._cut(self.rows)
            new_node = self._like(
                self.product, self.product.target, (*self.product.args[:-2], rows, self.product.args[-1])
            )
            for cast in self.casts:
                new_node = self._like(cast, cast.target, (new_node, *cast.args[1:]), cast.kwargs)
            # (not as the slice: its record would make the gradient's padding one of the operators behind the product)
            new_node = self._view(new_node, tensor(self.node).shape, self.product)
        self.node.replace_all_uses_with(new_node)
        self._refresh(new_node)
        return len(self.cuts)

    def _cut(self, rows: fx.Node) -> fx.Node:
        """Slice a matrix with a row for each of the product's rows, so that only the rows that the loss reads are left."""
        width = tensor(rows).shape[-1]
        for cut in self.cuts:
            rows = self._view(rows, [*tensor(cut.all_input_nodes[0]).shape[:-1], width], cut)
            rows = self._like(cut, aten.slice.Tensor, (rows, *cut.args[1:]))
        return self._view(rows, [math.prod(tensor(rows).shape[:-1]), width], self.cuts[-1])

    # -- the backward -------------------------------------------------------------------------------------------------
    def backward(self) -> int:
        numbers = {sequence(cut) for cut in self.cuts} - {None}
        fills = [
            n for n in self.program.graph.nodes if n.target in _FILLS and sequence(n) in numbers and not _of_forward(n)
        ]
        if not self.cuts or len(fills) != len(self.cuts):
            return 0
        first = fills[0]
        grad = _given(first)
        ends = self._ends(first, set(fills))
        if ends is None:
            return 0
        for node, end, casts in ends:
            with self.program.graph.inserting_before(end):
                end_grad = grad
                for cast in casts:
                    end_grad = self._like(cast, cast.target, (end_grad, *cast.args[1:]), cast.kwargs)
                width = tensor(grad).shape[-1]
                end_grad = self._view(end_grad, [math.prod(tensor(end_grad).shape[:-1]), width], end)
                if end.target is not aten.mm.default:
                    new_node = self._like(end, end.target, (end_grad, *end.args[1:]), end.kwargs)
                elif node is end.args[0] and node.target not in _PERMUTATIONS:
                    new_node = self._filled(self._like(end, end.target, (end_grad, end.args[1])), fills)
                else:
                    transposed = self._like(node, node.target, (end_grad, *node.args[1:]))
                    rows: fx.Node = end.args[1]  # type: ignore[assignment]
                    new_node = self._like(end, end.target, (transposed, self._cut(rows)))
            end.replace_all_uses_with(new_node)
            self._refresh(new_node)
        return len(fills)

    def _ends(self, first: fx.Node, fills: set[fx.Node]) -> list[tuple[fx.Node, fx.Node, list[fx.Node]]] | None:
        """Return the operators that read the gradient of the whole logits, as (the operand, its reader, the casts
        before).

        Returns None if anything but products, sums over rows and casts reads it.
        """
        ends: list[tuple[fx.Node, fx.Node, list[fx.Node]]] = []
        stack: list[tuple[fx.Node, list[fx.Node]]] = [(first, [])]
        while stack:
            node, casts = stack.pop()
            for user in node.users:
                matrix = len(tensor(node).shape) == 2
                if user.target in _VIEWS or user in fills:
                    stack.append((user, casts))
                elif is_cast(user):
                    stack.append((user, [*casts, user]))
                elif matrix and (_sums_rows(user) or (user.target is aten.mm.default and user.args[0] is node)):
                    ends.append((node, user, casts))
                elif (
                    user.target in _PERMUTATIONS
                    and matrix
                    and all(r.target is aten.mm.default and r.args[0] is user for r in user.users)
                ):
                    ends += [(user, r, casts) for r in user.users]
                else:
                    return None
        return ends

    def _filled(self, rows: fx.Node, fills: Sequence[fx.Node]) -> fx.Node:
        """Pad a matrix with zeros for the rows that the loss leaves out."""
        width = tensor(rows).shape[-1]
        for fill in fills:
            rows = self._view(rows, [*tensor(_given(fill)).shape[:-1], width], fill)
            sizes = [*tensor(fill).shape[:-1], width]
            if fill.target is aten.slice_backward.default:
                rows = self._like(fill, fill.target, (rows, sizes, *fill.args[2:]))
            else:
                kind = {"dtype": tensor(rows).dtype, "device": tensor(rows).device}
                zeros = self._like(fill, aten.full.default, (sizes, 0), kind)
                rows = self._like(fill, fill.target, (zeros, rows, *fill.args[2:]))
        return self._view(rows, [math.prod(tensor(rows).shape[:-1]), width], fills[-1])

    # -- nodes --------------------------------------------------------------------------------------------------------
    def _view(self, node: fx.Node, shape: Sequence[int], like: fx.Node) -> fx.Node:
        if list(tensor(node).shape) == list(shape):
            return node
        if not tensor(node).is_contiguous():
            node = self._like(like, aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
        return self._like(like, aten.view.default, (node, list(shape)))

    def _like(
        self, node: fx.Node, target: object, args: Sequence[object], kwargs: Mapping[str, object] | None = None
    ) -> fx.Node:
        """Build an operator for the same module, line and operation of autograd as `node`."""
        record = info(node).replace(made_by="narrow")
        new_node = self.program.call(target, tuple(args), record, name=node.name, kwargs=dict(kwargs or {}))
        for key, note in node.meta.items():
            if key not in ("tensor_meta", "original_aten"):
                new_node.meta.setdefault(key, note)
        return new_node

    def _refresh(self, narrowed: fx.Node) -> None:
        """Evaluate anew every node that depends on `narrowed`: its strides can differ from those of the value it replaces."""
        changed = {narrowed}
        for node in self.program.graph.nodes:
            if node.op == "call_function" and not changed.isdisjoint(node.all_input_nodes):
                node.meta["val"] = self.program.evaluate(node)
                changed.add(node)


def _sums_rows(node: fx.Node) -> bool:
    return node.target is aten.sum.dim_IntList and argument(node, 1) == [0]


def _given(fill: fx.Node) -> fx.Node:
    """Return the value that a fill pads."""
    return fill.args[0 if fill.target is aten.slice_backward.default else 1]  # type: ignore[return-value]


def _dim(cut: fx.Node) -> int:
    return int(argument(cut, 1, 0)) % len(tensor(cut).shape)

"""How values are stored over the ranks that compute a program together, in DTensor's words; and what is known of each value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zgraph.passes.analysis.axes import Axes, Axis
from zgraph.passes.spmd.sharding_rules import operands_of
from zgraph.program.aliases import is_view
from zgraph.program.node import value
from zgraph.program.program import Program
from zgraph.program.sizes import typical

aten = torch.ops.aten


@dataclass(frozen=True)
class Shard:
    """Each rank has an equal piece of a dimension, along one of its axes."""

    axis: Axis  # the axis that is divided (other dimensions of the value may have it as well)
    dim: int  # the dimension


@dataclass(frozen=True)
class Partial:
    """Each rank's value is a term of the whole value's sum, or of its maximum."""

    reduce_op: str  # what combines the ranks' values: "sum" or "max"


@dataclass(frozen=True)
class Replicate:
    """The value is whole on each rank."""


Placement = Shard | Partial | Replicate
REPLICATE = Replicate()


class Placements:
    """Each value's placement over the ranks of the mesh dimension `dim`, its axes, and its captured fake value.

    Of a `folded` axis rank r of n has the r-th and the r-th last of 2n pieces: under a causal mask each rank's rows
    then see as many rows as another's.
    """

    def __init__(self, program: Program, dim: str, axes: Axes, folded: frozenset[Axis] = frozenset()) -> None:
        self.program, self.dim, self.axes, self.folded = program, dim, axes, folded
        self.ranks = program.mesh[dim]
        self.of_results: dict[fx.Node, list[Placement]] = {}  # one for each result of a node
        self.captured = {n: value(n) for n in program.graph.nodes}
        self.arguments = {n: (n.args, n.kwargs) for n in program.graph.nodes}

    def of(self, node: fx.Node) -> Placement:
        """Return the placement of a node's only result, or of its first."""
        return self.of_results[node][0]

    def note(self, node: fx.Node) -> None:
        """Add a new node that belongs to the captured graph."""
        self.axes.add(node)
        self.captured[node] = value(node)
        self.arguments[node] = node.args, node.kwargs

    def stands_for(self, new_node: fx.Node, node: fx.Node, results: list[Placement]) -> None:
        """Note that a new node has the value of another, in these placements."""
        self.of_results[new_node] = results
        self.axes.alias(new_node, node)
        self.captured[new_node] = self.captured[node]

    def divides(self, axis: Axis) -> bool:
        """Return whether the ranks can have equal pieces of an axis."""
        return self.axes.size(axis) > 0 and self.axes.size(axis) % self.ranks == 0

    def size(self, node: fx.Node) -> int:
        """Return the number of elements of the whole value."""
        return typical(self.captured[node].numel())

    def source(self, node: fx.Node) -> fx.Node | None:
        """Return the base of a view that shows all of it, perhaps more than once, or None.

        The same for a copy of a value that shows its origin more than once.
        """
        copied = node.target is aten.clone.default
        if not (is_view(node) or copied) or len(operands_of(node)) != 1 or node not in self.axes.rules:
            return None
        source = operands_of(node)[0]
        if copied:
            return source if self.size(self.origin(source)) < self.size(node) else None
        return source if self.size(source) <= self.size(node) else None

    def origin(self, node: fx.Node) -> fx.Node:
        """Return the value that is sent where a view is needed in another placement."""
        while (source := self.source(node)) is not None and type(self.of(source)) is type(self.of(node)):
            node = source
        return node


def bytes_of(t: Any) -> float:
    """Return the bytes of a tensor, at the typical sizes of its program."""
    return float(typical(t.numel()) * t.element_size())

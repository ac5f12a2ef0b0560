"""From one placement to another: the slices and collectives that make a value whole, or a rank's part of it.

replicate -> shard     a slice                  shard a -> shard b     all_to_all
shard -> replicate     all_gather               partial -> replicate   all_reduce
                                                partial -> shard       reduce_scatter
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from zgraph.passes.analysis.axes import Shape
from zgraph.passes.spmd.placements import REPLICATE, Partial, Placement, Placements, Shard, bytes_of
from zgraph.program import collectives
from zgraph.program.node import NodeInfo, Role, info, tensor
from zgraph.program.sizes import part_of, stand_in, static, stood_for
from zgraph.program.transfers import mark_exchange

aten = torch.ops.aten

CONVERT = torch.ops.prims.convert_element_type.default


class Resharder:
    """A builder that inserts conversions between placements at the graph's insertion point, and counts the collectives
    and their bytes.
    """

    def __init__(self, placements: Placements) -> None:
        self.placements = placements
        self.program, self.dim, self.ranks = placements.program, placements.dim, placements.ranks
        self.axes, self.folded = placements.axes, placements.folded
        self.counts = {"all_gather": 0, "all_reduce": 0, "reduce_scatter": 0, "all_to_all": 0, "bytes": 0}
        self._index: fx.Node | None = None
        self._both: fx.Node | None = None

    def reshard(self, node: fx.Node, target: Placement, record: NodeInfo) -> fx.Node:
        """Build the value of a node in another placement than its own."""
        state, shape = self.placements.of(node), self.axes.shape(node)
        if isinstance(state, Partial):
            if isinstance(target, Shard):
                return self._reduce_scatter(node, shape, target, record)
            return self._all_reduce(node, state.reduce_op, record)
        if isinstance(target, Shard):
            if isinstance(state, Shard):
                return self._all_to_all(node, shape, state, target, record)
            return self.slice(node, shape, target, record)
        assert isinstance(state, Shard)
        return self._all_gather(node, shape, state, record)

    def call(self, target: object, args: tuple[object, ...], record: NodeInfo, name: str, **kwargs: object) -> fx.Node:
        new_node = self.program.call(target, args, record, name=name, kwargs=kwargs)  # type: ignore[arg-type]
        mark_exchange(new_node)
        return new_node

    def _start(self, target: object, args: tuple[object, ...], record: NodeInfo, name: str) -> fx.Node:
        dim = self.dim
        dtype = tensor(args[0]).dtype  # type: ignore[arg-type]
        if dtype is torch.bool:  # (Inductor would send them as int64, and not wait for them)
            args = (self.call(CONVERT, (args[0], torch.uint8), record, f"{name}_as_bytes"), *args[1:])
        there = record.replace(role=Role.EXCHANGE, mesh_dim=dim, stream=f"comm:{dim}")
        start = self.call(target, (*args, dim), there, name)
        kind = collectives.kind(start)
        self.counts[kind] += 1
        self.counts["bytes"] += int(bytes_of(tensor(start.all_input_nodes[0])))
        wait = self.call(collectives.WAIT, (start,), there.replace(role=Role.WAIT), f"{name}_wait")
        return wait if dtype is not torch.bool else self.call(CONVERT, (wait, dtype), record, name)

    def packed(self, node: fx.Node, record: NodeInfo) -> fx.Node:
        if tensor(node).is_contiguous():
            return node
        return self.call(aten.clone.default, (node,), record, "packed", memory_format=torch.contiguous_format)

    def viewed(self, node: fx.Node, shape: Sequence[int], record: NodeInfo) -> fx.Node:
        if list(map(static, tensor(node).shape)) == list(map(static, shape)):
            return node
        return self.call(aten.view.default, (self.packed(node, record), list(shape)), record, "viewed")

    def _moved_dim(self, node: fx.Node, source: int, to: int, record: NodeInfo) -> fx.Node:
        order = [d for d in range(tensor(node).dim()) if d != source]
        order.insert(to, source)
        if order == sorted(order):
            return node
        return self.call(aten.permute.default, (node, order), record, "moved")

    def _where(self, shape: Shape, part: Shard) -> tuple[int, int, int]:
        """Return the dimension of a part, and the sizes of the axes outside and inside of its own."""
        dim = shape[part.dim]
        at = dim.index(part.axis)
        outer, inner = (math.prod(self.axes.size(a) for a in some) for some in (dim[:at], dim[at + 1 :]))
        return part.dim, outer, inner

    def _opened(self, node: fx.Node, shape: Shape, part: Shard, pieces: int, record: NodeInfo) -> tuple[fx.Node, int]:
        """Return a view in which the pieces of a part's axis have a dimension of their own, and that dimension."""
        d, outer, inner = self._where(shape, part)
        sizes = list(tensor(node).shape)
        each = stand_in(sizes[d]) // (outer * inner * pieces) * inner
        parts = [outer, pieces, each]
        return self.viewed(node, [*sizes[:d], *map(self._size, parts), *sizes[d + 1 :]], record), d + 1

    def _size(self, number: int) -> Any:
        return stood_for(number, self.program.fake_mode)

    def _by_rank(self, node: fx.Node, shape: Shape, part: Shard, record: NodeInfo) -> tuple[fx.Node, int]:
        """Return a view with a dimension for the ranks, before each rank's piece, and that dimension."""
        if part.axis not in self.folded:
            return self._opened(node, shape, part, self.ranks, record)
        opened, at = self._opened(node, shape, part, 2 * self.ranks, record)
        first, last = (
            self.call(aten.slice.Tensor, (opened, at, begin, begin + self.ranks), record, "half")
            for begin in (0, self.ranks)
        )
        back = self.call(torch.ops.prims.rev.default, (last, [at]), record, "from_behind")
        both = [self.call(aten.unsqueeze.default, (x, at + 1), record, "half") for x in (first, back)]
        folded = self.call(aten.cat.default, (both, at + 1), record, "folded")
        sizes = list(tensor(folded).shape)
        return self.viewed(folded, [*sizes[: at + 1], 2 * sizes[at + 2], *sizes[at + 3 :]], record), at

    def _in_order(self, node: fx.Node, at: int, record: NodeInfo) -> fx.Node:
        """Put the ranks' halves of a folded axis, by rank in dimension `at`, into the order of the whole."""
        sizes = list(tensor(node).shape)
        half = part_of(sizes[at + 1], 2)
        opened = self.viewed(node, [*sizes[: at + 1], 2, half, *sizes[at + 2 :]], record)
        first, last = (self.call(aten.select.int, (opened, at + 1, half), record, "half") for half in (0, 1))
        back = self.call(torch.ops.prims.rev.default, (last, [at]), record, "from_behind")
        return self.call(aten.cat.default, ([first, back], at), record, "in_order")

    def slice(self, node: fx.Node, shape: Shape, part: Shard, record: NodeInfo) -> fx.Node:
        pieces = 2 * self.ranks if part.axis in self.folded else self.ranks
        opened, at = self._opened(node, shape, part, pieces, record)
        return self.viewed(self.picked(opened, at, record), self._local(node, part), record)

    def picked(self, opened: fx.Node, dim: int, record: NodeInfo) -> fx.Node:
        """Return this rank's pieces along a dimension: one, or the two of a folded axis."""
        place = self.place() if static(tensor(opened).shape[dim]) == self.ranks else self._places()
        return self.call(aten.index.Tensor, (opened, [*([None] * dim), place]), record, "mine")

    def _local(self, whole: fx.Node, part: Shard) -> list[int]:
        """Return the shape of a rank's part of a whole value."""
        return [part_of(s, self.ranks) if i == part.dim else s for i, s in enumerate(tensor(whole).shape)]

    def place(self) -> fx.Node:
        """Return this rank's position, as a tensor of one element."""
        if self._index is None:
            self._index = self.program.position(self.dim, "divide")
        return self._index

    def _places(self) -> fx.Node:
        """Return this rank's two positions in a folded axis."""
        if self._both is None:
            place = self.place()
            record = info(place)
            with self.program.graph.inserting_after(place):
                back = self.call(aten.sub.Tensor, (place, 2 * self.ranks - 1), record, "from_behind")
            with self.program.graph.inserting_after(back):
                back = self.call(aten.neg.default, (back,), record, "from_behind")
            with self.program.graph.inserting_after(back):
                self._both = self.call(aten.cat.default, ([place, back],), record, "places")
        return self._both

    def _all_reduce(self, node: fx.Node, how: str, record: NodeInfo) -> fx.Node:
        return self._start(collectives.ALL_REDUCE, (self.packed(node, record), how), record, f"{node.name}_{how}")

    def _all_gather(self, node: fx.Node, shape: Shape, part: Shard, record: NodeInfo) -> fx.Node:
        d, outer, _ = self._where(shape, part)
        return self.joined(node, d, outer, record, part.axis in self.folded)

    def joined(self, node: fx.Node, d: int, outer: int, record: NodeInfo, folded: bool = False) -> fx.Node:
        """Gather the ranks' parts one after another in dimension d, in each of the `outer` blocks that it has."""
        local = list(tensor(node).shape)
        source, at = node, 0
        if outer > 1 or d or folded:
            each = self._size(stand_in(local[d]) // outer)
            source, at = self.viewed(node, [*local[:d], self._size(outer), each, *local[d + 1 :]], record), d + 1
        opened = list(tensor(source).shape)
        whole = self._start(
            collectives.ALL_GATHER, (self.packed(source, record), self.ranks), record, f"{node.name}_whole"
        )
        if at:
            whole = self._moved_dim(self.viewed(whole, [self.ranks, *opened], record), 0, at, record)
        if folded:
            whole = self._in_order(whole, at, record)
        return self.viewed(whole, [s * self.ranks if i == d else s for i, s in enumerate(local)], record)

    def _reduce_scatter(self, node: fx.Node, shape: Shape, part: Shard, record: NodeInfo) -> fx.Node:
        local = self._local(node, part)
        opened, at = self._by_rank(node, shape, part, record)
        front = self.packed(self._moved_dim(opened, at, 0, record), record)
        sizes = list(tensor(front).shape)
        flat = self.viewed(front, [sizes[0] * sizes[1], *sizes[2:]], record)
        mine = self._start(collectives.REDUCE_SCATTER, (flat, "sum", self.ranks), record, f"{node.name}_part")
        return self.viewed(mine, local, record)

    def _all_to_all(self, node: fx.Node, shape: Shape, one: Shard, other: Shard, record: NodeInfo) -> fx.Node:
        """Convert a shard along one axis to a shard along another."""
        d, outer, inner = self._where(shape, one)
        sizes = list(tensor(node).shape)
        e = other.dim
        if d == e:  # (both in one dimension: gathered, then cut)
            whole = self._all_gather(node, shape, one, record)
            self.placements.stands_for(whole, node, [REPLICATE])
            return self.slice(whole, shape, other, record)
        opened, at = self._by_rank(node, shape, other, record)
        front = self.packed(self._moved_dim(opened, at, 0, record), record)
        swapped = list(tensor(front).shape)
        flat = self.viewed(front, [swapped[0] * swapped[1], *swapped[2:]], record)
        even = [swapped[1]] * self.ranks
        came = self._start(collectives.ALL_TO_ALL, (flat, even, even), record, f"{node.name}_turned")
        mine = [part_of(s, self.ranks) if i == e else s for i, s in enumerate(sizes)]
        part = stand_in(sizes[d]) // (outer * inner) * inner
        spread = self.viewed(came, [self.ranks, *mine[:d], self._size(outer), self._size(part), *mine[d + 1 :]], record)
        joined = self._moved_dim(spread, 0, d + 1, record)
        if one.axis in self.folded:
            joined = self._in_order(joined, d + 1, record)
        return self.viewed(joined, [s * self.ranks if i == d else s for i, s in enumerate(mine)], record)

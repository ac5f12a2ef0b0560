"""Products and the collectives beside them run in pieces: while one piece is on the link, the next is multiplied (async
tensor parallelism).

*Contract.* On entry the ranks of a mesh dimension compute the program together ("divided"): a collective stands between
the maker of its value and its readers, and has nothing to run beside. On exit, where that saves simulated time, rows
are cut into pieces:

    mm -> all_reduce                 mm 0, start 0, mm 1, start 1, …, wait 0, wait 1, …      (also reduce_scatter)
    all_gather -> mm, mm             start 0, start 1, …, wait 0, mm 0, mm 0, wait 1, mm 1, mm 1, …

The pieces' results are put together for other readers; products over the rows (gradients of weights) are added up,
piece by piece. Each rank sends the same bytes as before, in more messages, and nothing is rounded otherwise but sums
over rows, whose order changes.

Whether it pays, and in how many pieces, follows from the costs of the operators' and transfers' pieces on the
simulator's two streams. Collectives whose surroundings are alike (those of equal layers) are decided once. (Wang et al.
2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models"; PyTorch's
async tensor parallelism does it with kernels that pull from peers.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zgraph.passes.analysis.axes import Axes, Axis
from zgraph.passes.analysis.costs import CPU, Costs, computes, signature
from zgraph.passes.analysis.fusion import pointwise
from zgraph.passes.analysis.slices import PRODUCTS, Slices, rows_of, sliced
from zgraph.passes.contract import graph_pass
from zgraph.program import collectives
from zgraph.program.aliases import is_view
from zgraph.program.groups import ranks_in
from zgraph.program.node import NodeInfo, Role, info, tensor
from zgraph.program.program import TENSOR_DIM, Fact, Program
from zgraph.program.remark import Remark
from zgraph.program.sizes import is_stand_in

aten = torch.ops.aten

_COPIES = {aten.clone.default, aten._to_copy.default, torch.ops.prims.convert_element_type.default}
PIECES = (2, 4, 8)
"""The numbers of pieces that are tried."""
MIN_GAIN = 0.02
"""The share of a collective's and its products' time that has to be saved: costs are estimates."""


@dataclass(frozen=True)
class InterleaveOptions:
    """Options of `interleave`."""

    dim: str = TENSOR_DIM  # the mesh dimension
    pieces: int | None = None  # the pieces of each collective beside products, None: as many as pay, if any
    costs: Costs = field(default_factory=lambda: Costs(CPU))  # the costs of operators and transfers


@graph_pass(
    "interleave",
    "products and collectives beside them run in pieces, each beside the next",
    options=InterleaveOptions,
    requires=(Fact.DIVIDED,),
    provides=(Fact.INTERLEAVED,),
    conflicts=(Fact.SHARDED, Fact.SCHEDULED),
    bitwise=False,
)
def interleave(program: Program, options: InterleaveOptions) -> dict[str, int]:
    counts = {"collectives": 0, "pieces": 0, "left": 0}
    if program.mesh.get(options.dim, 1) == 1:
        return counts
    axes = Axes(program)
    decided: dict[object, tuple[int, int]] = {}
    for start in [n for n in program.nodes if _exchanges(n, options.dim)]:
        regions = list(_regions(program, axes, start))
        if not regions:
            continue
        kind = tuple(r.kind() for r in regions)
        if kind not in decided:
            decided[kind] = _decide(program, axes, regions, options)
        at, count = decided[kind]
        if count == 1:
            counts["left"] += 1
            program.remarks.append(_left(start, options.pieces))
            continue
        pieces = _Pieces(program, axes, regions[at], count)
        pieces.write()
        pieces.keep()
        counts["collectives"] += 1
        counts["pieces"] += count
    return counts


def _exchanges(node: fx.Node, dim: str) -> bool:
    record = info(node)
    return (
        collectives.is_start(node) and record.role is Role.EXCHANGE and record.mesh_dim == dim and record.chunk is None
    )


def _left(start: fx.Node, asked: int | None) -> Remark:
    what = f"{collectives.kind(start)} of {start.all_input_nodes[0].name} is not cut into pieces"
    if asked is not None:
        why, remedy = f"it has no {asked} rows, nor columns", "async_tensor_parallel=2"
    else:
        why = "they would take as long: each has a latency, and small products are slower"
        remedy = "larger batches or sequences; async_tensor_parallel=2 to have it so"
    return Remark("interleave", start.name, what, why, 0.0, remedy)


# -- what can run in pieces -------------------------------------------------------------------------------------------------
@dataclass
class _Region:
    """A collective with the products beside it."""

    axis: Axis  # the axis that they are cut along
    start: fx.Node  # the node that starts the collective
    wait: fx.Node  # the node that waits for it
    before: list[fx.Node]  # from the products that make its value to the start, in order
    behind: list[fx.Node]  # from the wait to the products that read its value, in order

    @property
    def nodes(self) -> list[fx.Node]:
        return [*self.before, self.start, self.wait, *self.behind]

    def read(self) -> list[fx.Node]:
        """Return the values that others read, whose pieces have to be put together."""
        own = set(self.nodes)
        return [n for n in self.nodes if n is not self.start and any(u not in own for u in n.users)]

    @property
    def ends(self) -> fx.Node:
        """The node before which the wait's pieces are put: the first product that reads them, or the wait."""
        return next((n for n in self.behind if n.target in PRODUCTS), self.wait)

    def beside(self) -> list[fx.Node]:
        """Return the operators that run between start and wait anyway."""
        own, operators, node = set(self.nodes), [], self.start.next
        while node is not self.ends:
            operators += [node] if node not in own and computes(node) else []
            node = node.next
        return operators

    def kind(self) -> object:
        """Return a key that is equal for regions that take equal times."""
        return self.axis, *(signature(n) for n in (*self.nodes, *self.beside()))


def _regions(program: Program, axes: Axes, start: fx.Node) -> Iterator[_Region]:
    """Yield the regions of a collective, one for each axis that it can be cut along, those of outer dimensions first."""
    wait = collectives.wait_of(start)
    if wait is None or collectives.kind(start) not in ("all_gather", "all_reduce", "reduce_scatter"):
        return
    all_axes = [axis for dim in axes.shape(start.all_input_nodes[0]) for axis in dim]
    for axis in dict.fromkeys(all_axes):
        if is_stand_in(axes.size(axis)) or any(sliced(axes, n, axis) != (True,) for n in (start, wait)):
            continue
        gathers = collectives.kind(start) == "all_gather"
        before = [] if gathers else _makers(axes, start, axis)
        behind = _readers(axes, wait, axis) if gathers else []
        if before or behind:
            yield _Region(axis, start, wait, before, behind)


def _passes_on(node: fx.Node) -> bool:
    return is_view(node) or node.target in _COPIES


def _makers(axes: Axes, start: fx.Node, axis: Axis) -> list[fx.Node]:
    """Return the nodes from the products that a start's value, a sum over ranks, is made of, up to the start.

    Empty if there is no product, or if another node before the start reads one of these values.
    """
    seen: dict[fx.Node, None] = {}
    stack = [start.all_input_nodes[0]]
    while stack:
        node = stack.pop()
        if node in seen or info(node).phase is not info(start).phase or sliced(axes, node, axis) != (True,):
            continue
        product = node.target in PRODUCTS
        if product or _passes_on(node) or pointwise(node):
            seen[node] = None
            stack += [] if product else node.all_input_nodes
    makers: dict[fx.Node, None] = {}
    for node in sorted(seen):  # (values that depend on no product are sliced as they are)
        if node.target in PRODUCTS or any(o in makers for o in node.all_input_nodes):
            makers[node] = None
    return [] if any(u < start and u not in makers for n in makers for u in n.users) else list(makers)


def _readers(axes: Axes, wait: fx.Node, axis: Axis) -> list[fx.Node]:
    """Return the nodes from a wait to the products that read its value and can run at the position of the first of
    them.

    Empty if there is none, or if another node before that product reads these values.
    """
    seen: dict[fx.Node, None] = {}
    stack = list(wait.users)
    while stack:
        node = stack.pop()
        if node in seen or node.op != "call_function" or info(node).phase is not info(wait).phase:
            continue
        product = node.target in PRODUCTS
        if (product or _passes_on(node)) and sliced(axes, node, axis) is not None:
            seen[node] = None
            stack += [] if product else node.users
    products = [n for n in seen if n.target in PRODUCTS]
    if not products:
        return []
    first = min(products)
    readers = {wait: None}
    for node in sorted(seen):
        others = [o for o in node.all_input_nodes if o not in readers]
        if len(others) < len(node.all_input_nodes) and all(o < first or _of_inputs(o) for o in others):
            readers[node] = None
    for node in reversed(list(readers)):
        if node.target not in PRODUCTS and not any(u in readers for u in node.users):
            del readers[node]
    if any(u < first and u not in readers for n in readers for u in n.users):
        return []
    return [n for n in readers if n is not wait]


def _of_inputs(node: fx.Node) -> bool:
    """Return whether a value is an input, or a view of one, which could be moved anywhere."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


# -- whether it pays --------------------------------------------------------------------------------------------------------
class _Clock:
    """The time of a region and of the transfers near it, on one compute stream and one link: from the second transfer
    before it to the end of the second one after it.
    """

    def __init__(self, program: Program, costs: Costs, region: _Region) -> None:
        self.program, self.costs, self.region = program, costs, region
        self.roof = Costs(costs.hardware.model_copy(update={"operators": {}}), costs.fused)
        self.first, self.last = region.nodes[0], region.nodes[-1]
        for _ in range(2):
            while (before := self.first.prev).op == "call_function":
                self.first = before
                if collectives.is_start(before):
                    break
            while (behind := self.last.next).op == "call_function":
                self.last = behind
                if collectives.is_wait(behind):
                    break

    def alone(self) -> tuple[float, float]:
        """Return the seconds of the region's transfer, and of its operators."""
        operators = sum(self._operator(n, None) for n in self.region.nodes if computes(n))
        return self._transfer(self.region.start)[0], operators

    def seconds(self, pieces: _Pieces | None = None) -> float:
        """Return the seconds with the region as it is, or in pieces."""
        without = set() if pieces is None else pieces.own
        origin = {} if pieces is None else pieces.origin
        clock = free = 0.0
        done: dict[fx.Node, float] = {}
        node, end = self.first, self.last.next
        while node is not end:
            if node in without:
                pass
            elif collectives.is_start(node):
                seconds, work = self._transfer(node)
                clock += work
                done[node] = free = max(clock, free) + seconds
            elif collectives.is_wait(node):
                clock = max(clock, done.get(collectives.start_of(node), 0.0))
            elif computes(node):
                clock += self._operator(node, origin.get(node))
            node = node.next
        return clock

    def _transfer(self, start: fx.Node) -> tuple[float, float]:
        ranks = ranks_in(str(info(start).mesh_dim), self.program.mesh)
        return self.costs.transfer([start], ranks), self.costs.work([start])

    def _operator(self, node: fx.Node, whole: fx.Node | None) -> float:
        """Return the seconds of an operator. A piece of a measured one takes the share of its time that the roofline
        gives.
        """
        if whole is None or not self.costs.hardware.measured:
            return self.costs.operator(node)
        return self.roof.operator(node) * self.costs.operator(whole) / (self.roof.operator(whole) or 1.0)


def _decide(program: Program, axes: Axes, regions: Sequence[_Region], options: InterleaveOptions) -> tuple[int, int]:
    """Return which region of one collective takes least time, and the number of pieces: 1 if they save too little."""
    clocks = [_Clock(program, options.costs, region) for region in regions]
    link, operators = clocks[0].alone()
    if options.pieces is None and min(link, operators) < MIN_GAIN * (link + operators):
        return 0, 1
    best, least = (0, 1), math.inf if options.pieces else clocks[0].seconds() - MIN_GAIN * (link + operators)
    for at, (region, clock) in enumerate(zip(regions, clocks, strict=True)):
        for count in (options.pieces,) if options.pieces else PIECES:
            if count > axes.size(region.axis):
                break
            pieces = _Pieces(program, axes, region, count)
            pieces.write()
            seconds = clock.seconds(pieces)
            pieces.undo()
            if seconds < least:
                best, least = (at, count), seconds
            elif options.pieces is None:
                break  # (more pieces would cost still more to put together)
    return best


# -- pieces -----------------------------------------------------------------------------------------------------------------
class _Pieces(Slices):
    """One region in pieces, beside its old nodes: `keep` removes these, `undo` the pieces. `origin` has the old node of
    each piece.
    """

    def __init__(self, program: Program, axes: Axes, region: _Region, count: int) -> None:
        super().__init__(program, axes, region.axis, count)
        self.region = region
        self.made: list[dict[fx.Node, fx.Node]] = [{} for _ in range(count)]
        self.slices: list[dict[fx.Node, fx.Node]] = [{} for _ in range(count)]
        self.sums: dict[fx.Node, fx.Node] = {}
        self.own = set(region.nodes)
        self.origin: dict[fx.Node, fx.Node] = {}
        self.joins: dict[fx.Node, fx.Node] = {}
        self.new: list[fx.Node] = []

    def write(self) -> None:
        region, graph = self.region, self.program.graph
        read = region.read()
        early = [n for n in read if n in region.before]
        with graph.inserting_before(region.start):
            for chunk in range(self.count):
                self._piece([*region.before, region.start], chunk)
            self._join(early)
        with graph.inserting_before(region.ends):
            for chunk in range(self.count):
                self._piece([region.wait, *region.behind], chunk)
            self._join([n for n in read if n not in early])

    def keep(self) -> None:
        self._bring_inputs()
        for node, joined in self.joins.items():
            self.axes.alias(joined, node)
            for user in list(node.users):
                if user not in self.own:
                    user.replace_input_with(node, joined)
        for node in reversed(self.region.nodes):
            self.program.graph.erase_node(node)

    def undo(self) -> None:
        for node in reversed(self.new):
            self.program.graph.erase_node(node)

    def _bring_inputs(self) -> None:
        """Move views of inputs that products read before the first of the pieces."""
        if not self.region.behind:
            return
        first = self.made[0][self.region.wait]
        for node in self.region.behind:
            for operand in node.all_input_nodes:
                chain = []
                while operand not in self.own and is_view(operand) and first < operand:
                    chain.append(operand)
                    operand = operand.all_input_nodes[0]
                for view in reversed(chain):
                    first.prepend(view)

    def _piece(self, nodes: Sequence[fx.Node], chunk: int) -> None:
        new_nodes, slices = self.made[chunk], self.slices[chunk]
        for node in nodes:
            record = _record(node)

            def now(operand: fx.Node, record: NodeInfo = record) -> fx.Node:
                if operand in new_nodes:
                    return new_nodes[operand]
                if operand not in slices and rows_of(self.axes, operand, self.axis):
                    slices[operand] = self.slice(
                        operand, chunk, record.replace(role=Role.COMPUTE, mesh_dim=None, stream="compute")
                    )
                return slices.get(operand, operand)

            if sliced(self.axes, node, self.axis) == (False,):
                self.sums[node] = piece = self.total(node, chunk, now, record, self.sums.get(node))
            else:
                new_nodes[node] = piece = self.one(node, chunk, now, record)
            self.origin[piece] = node

    def _call(self, target: Any, args: tuple[Any, ...], record: NodeInfo, name: str, **kwargs: Any) -> fx.Node:
        new_node = super()._call(target, args, record, name, **kwargs)
        self.new.append(new_node)
        return new_node

    def _join(self, nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            record = _record(node).replace(role=Role.COMPUTE, mesh_dim=None, stream="compute")
            if node in self.sums:
                self.joins[node] = self.cast(self.sums[node], tensor(node).dtype, record)
            else:
                self.joins[node] = self.joined([new_nodes[node] for new_nodes in self.made], node, record)


def _record(node: fx.Node) -> NodeInfo:
    return info(node).replace(made_by="interleave", copy_of=None)

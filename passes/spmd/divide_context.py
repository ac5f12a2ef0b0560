"""Lets the ranks of a mesh dimension each work on a part of the sequence (context parallelism).

*Contract.* As `divide`, but weights are whole on every rank and tokens are divided. The axis of the sequence is found
in the graph: in products of activations with weights, it is the axis of rows that is not the batch's. The placements of
all values follow from there, as their operators allow. Attention needs whole sequences, and gets them for a part of the
heads (all_to_all before and after it: Ulysses, Jacobs et al. 2023) where the ranks divide the heads, or computes block
by block in a ring (`zgraph.passes.spmd.ring`; where it is sparse, only what is read is sent: `sparse_ring`). Masks,
positions and the loss's mean are those of the whole sequence, as they stand in the graph; gradients are sums over ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from zgraph.errors import PlanError
from zgraph.passes.analysis.axes import Axes, Axis
from zgraph.passes.contract import graph_pass
from zgraph.passes.spmd.choose_placements import FindWay, Goal
from zgraph.passes.spmd.divide import divide_program
from zgraph.passes.spmd.heads_of_ranks import WAYS, way_by_heads
from zgraph.passes.spmd.packed_ring import PACKED_RINGS, can_ring_packed, packed_ring_way
from zgraph.passes.spmd.placements import Placements
from zgraph.passes.spmd.ring import RINGS, ROWS, can_ring, is_causal, ring_way
from zgraph.passes.spmd.sharding_rules import ATTENTION, RANKS, operands_of
from zgraph.passes.spmd.sparse_ring import SPARSE_RINGS, can_ring_sparse, sparse_ring_way
from zgraph.program import collectives
from zgraph.program.attention_of_heads import OF_HEADS
from zgraph.program.node import Phase, info, tensor, value
from zgraph.program.program import CONTEXT_DIM, Fact, InputRole, Level, Program

logger = logging.getLogger(__name__)
aten = torch.ops.aten

SHARE = 0.1
"""The least share of all products' operations along an axis that makes it a sequence that has to be divided."""


@dataclass(frozen=True)
class ContextOptions:
    """Options of `divide_context`."""

    dim: str = CONTEXT_DIM  # the mesh dimension
    sequence_dim: int | None = None  # the inputs' dimension that is the sequence's (None: found in the graph)
    attention: str = "auto"  # how attention is computed: by "heads", in a "ring", or "auto"
    staged: bool = False  # whether the program is a pipeline stage's, so that attention may be in other stages


@graph_pass(
    "divide_context",
    "the ranks of a mesh dimension each compute a part of the sequence",
    options=ContextOptions,
    requires=(Fact.CLEAN,),
    provides=(Fact.DIVIDED,),
    conflicts=(Fact.SHARDED,),
    bitwise=False,
    level=Level.DISTRIBUTED,
)
def divide_context(program: Program, options: ContextOptions) -> dict[str, int]:
    if program.mesh.get(options.dim, 1) == 1:
        return {}
    _refuse_two_dimensions(program)
    axes = Axes(program)
    along = sequences(program, axes, options)
    batch = batch_axes(program, axes) - along
    folded = _folded(program, axes, along, program.mesh[options.dim])
    rings = _by_ring(program, axes, along, batch, folded, options)
    ways: dict[object, FindWay] = dict(WAYS)
    if rings:
        ways |= dict.fromkeys(RINGS, lambda placements, node: ring_way(placements, node, along))
        ways |= dict.fromkeys(PACKED_RINGS, lambda placements, node: packed_ring_way(placements, node, along))
        ways |= dict.fromkeys(SPARSE_RINGS, lambda p, node: sparse_ring_way(p, node, along) or way_by_heads(p, node))
    placements = Placements(program, options.dim, axes, folded if rings else frozenset())
    return divide_program(placements, Goal(along=along, batch=batch, ways=ways))


def _refuse_two_dimensions(program: Program) -> None:
    """Raise `PlanError` for attention whose heads another mesh dimension has divided, and are not alike."""
    for node in program.nodes:
        if node.target in OF_HEADS.values():
            raise PlanError(
                "attention has dropout, and both mesh.tp and mesh.cp divide its heads",
                where=f"attention ({info(node).source})",
                why="a rank finds which weights are dropped by its place in one dimension of the mesh",
                hint='set the dropout of attention to 0; or leave "tp" or "cp" out of the mesh',
            )


def _folded(program: Program, axes: Axes, along: frozenset[Axis], ranks: int) -> frozenset[Axis]:
    """Return the sequences with causal attention of which each rank can have two pieces."""
    causal = [n for n in program.nodes if n.target in RINGS and is_causal(n) and can_ring(n, axes, along, along)]
    rows = {axes.shape(operands_of(n)[1])[ROWS][0] for n in causal}
    return frozenset(axis for axis in rows if axes.size(axis) % (2 * ranks) == 0)


def _by_ring(
    program: Program,
    axes: Axes,
    along: frozenset[Axis],
    batch: frozenset[Axis],
    folded: frozenset[Axis],
    options: ContextOptions,
) -> bool:
    """Return whether attention is computed by a ring where it can be, and warn of attention that every rank computes
    whole.

    Raises `PlanError` where no attention can be computed by a ring and the plan asks for it.
    """
    ranks = program.mesh[options.dim]
    every = _attention(program)
    calls = [n for n in every if any(a in along for dim in axes.shape(operands_of(n)[0]) for a in dim)]
    able = [
        n
        for n in calls
        if can_ring(n, axes, along, folded)
        or can_ring_packed(n, axes, along)
        or can_ring_sparse(n, axes, along, folded)
    ]

    def by_heads(node: fx.Node) -> bool:
        rule = axes.rules.get(node)
        heads = axes.under(node, rule, "h") if rule is not None and "h" in rule.sizes else ()
        return any(axes.size(a) % ranks == 0 for a in heads if a not in batch)

    stuck = [n for n in calls if not by_heads(n)]
    if options.attention == "ring" and not able and (every or not options.staged):
        raise _no_ring(
            f"{len(calls)} are calls of scaled_dot_product_attention on the sequence; a mask (but that of packed documents), dropout, or other "
            f"lengths than multiples of {2 * ranks} where it is causal stand against it; against sparse attention, a mask with a gradient, or an "
            "accelerator"
        )
    ring = options.attention == "ring" or (options.attention == "auto" and any(n in able for n in stuck))
    whole = [n for n in stuck if not (ring and n in able)]
    if whole:
        logger.warning(
            "attention of %d modules (%s, …) is computed whole on each rank of %r: %d does not divide its heads, and %s",
            len(whole),
            info(whole[0]).module or "(root)",
            options.dim,
            ranks,
            "the plan says so"
            if whole[0] in able
            else "a mask, dropout, an odd length or, where it is sparse, a mask with a gradient or an accelerator stand against a ring",
        )
    return ring


def refuse_without_attention(program: Program) -> None:
    """Raise `PlanError` for a whole model that calls no attention, though the plan wants a ring to compute it."""
    if not _attention(program):
        raise _no_ring(
            "it has no attention operator: scaled_dot_product_attention is not called, or torch computes it by plain products (as where "
            "the elements of a query do not lie next to each other)"
        )


def _attention(program: Program) -> list[fx.Node]:
    return [n for n in program.nodes if n.target in ATTENTION and info(n).phase is Phase.FORWARD]


def _no_ring(why: str) -> PlanError:
    return PlanError(
        "no attention of the model can be computed by a ring",
        where="context_attention",
        why=why,
        hint='context_attention="heads", or is_causal=True in place of a mask',
    )


def batch_axes(program: Program, axes: Axes) -> frozenset[Axis]:
    """Return the axes of inputs' first dimension; of inputs of one dimension (positions, flat labels) only if it is as
    long as the others'.
    """
    inputs = [n for n in _inputs(program) if tensor(n).dim()]
    rows = {tensor(n).shape[0] for n in inputs if tensor(n).dim() > 1}
    inputs = [n for n in inputs if tensor(n).dim() > 1 or not rows or tensor(n).shape[0] in rows]
    return frozenset(axis for n in inputs for axis in axes.shape(n)[0])


def sequences(program: Program, axes: Axes, options: ContextOptions) -> frozenset[Axis]:
    """Return the axes that ranks divide: one for each sequence (an encoder's, a decoder's).

    Raises `PlanError` where there is none, where values have several at once, and where the number of ranks does not
    divide one.
    """
    ranks = program.mesh[options.dim]
    if options.sequence_dim is not None:
        candidates = _told(program, axes, options.sequence_dim)
    else:
        candidates = _found(program, axes, ranks)
    chosen = set()
    for dim, needed in candidates.items():
        fits = [a for a in dim if axes.size(a) % ranks == 0]
        if fits:
            chosen.add(fits[0])
        elif needed:
            raise PlanError(
                f"a sequence of {math.prod(axes.size(a) for a in dim)} can't be divided among {ranks} ranks",
                where=f"mesh.{options.dim}",
                why="each has an equal part of it",
                hint=f"pad it to a multiple of {ranks}, or another number of ranks",
            )
    return frozenset(chosen)


def _inputs(program: Program) -> list[fx.Node]:
    return [n for p, n in program.input_items() if p.role is InputRole.INPUT and isinstance(value(n), torch.Tensor)]


Sequence = tuple[Axis, ...]
"""A dimension's axes, outermost first."""


def _told(program: Program, axes: Axes, dim: int) -> dict[Sequence, bool]:
    shapes = [axes.shape(n) for n in _inputs(program)]
    candidates = {shape[dim]: True for shape in shapes if -len(shape) <= dim < len(shape) and shape[dim]}
    if not candidates:
        raise PlanError(
            f"no input has a dimension {dim} of more than one element",
            where="sequence_dim",
            hint="the dimension of inputs that runs over the sequence, 1 where it is behind the batch",
        )
    return candidates


def _found(program: Program, axes: Axes, ranks: int) -> dict[Sequence, bool]:
    batch = batch_axes(program, axes)
    among_ranks = {a for n, rule in axes.rules.items() if RANKS in rule.sizes for a in axes.under(n, rule, RANKS)}
    one = {
        dim for n in axes.rules for shape in axes.shapes(n) for dim in shape
    }  # (groups of axes that are one dimension of some value)
    work: dict[Sequence, float] = {}
    several: dict[fx.Node, float] = {}
    total = 0.0
    for node, free in _products(program, axes):
        operations = float(math.prod(tensor(node).shape)) * _depth(node)
        total += operations
        free = tuple(a for a in free if a not in batch and a not in among_ranks)
        if len(free) > 1 and free not in one:
            several[node] = operations
            continue
        if free:
            work[free] = work.get(free, 0.0) + operations
    unknown = "which dimension of the inputs is the sequence can't be told"
    if sum(several.values()) > sum(work.values()):
        module = info(max(several, key=lambda n: several[n])).module or "(root)"
        raise PlanError(
            unknown,
            where=f"mesh.{CONTEXT_DIM}",
            why=f"weights are multiplied with values that have several dimensions besides the batch's (in module {module})",
            hint="say sequence_dim=1 if it is the one behind the batch",
        )
    if not work:
        raise PlanError(
            unknown,
            where=f"mesh.{CONTEXT_DIM}",
            why="no weight is multiplied with values that have another dimension than the batch's",
            hint='the ranks may be those of "dp" or "tp"',
        )
    return {dim: operations >= SHARE * total for dim, operations in work.items()}


def _depth(node: fx.Node) -> int:
    """Return the length of the sum in each element of a product."""
    first: fx.Node = node.args[1 if node.target is aten.addmm.default else 0]  # type: ignore[assignment]
    return int(tensor(first).shape[-1])


_PRODUCTS = {aten.mm.default: "m", aten.addmm.default: "m", aten.bmm.default: "bm"}


def _products(program: Program, axes: Axes) -> Iterator[tuple[fx.Node, Sequence]]:
    """Yield products of activations with weights in the forward, each with the axes of its rows."""
    weights: set[fx.Node] = set(program.input_nodes(InputRole.PARAMETER).values())
    for node in program.nodes:
        read = node.all_input_nodes
        if node.op != "call_function" or info(node).phase is not Phase.FORWARD or not read:
            continue
        if collectives.is_start(node) and read[0] not in weights:
            continue
        if all(n in weights for n in read):
            weights.add(node)
        elif node.target in _PRODUCTS and node in axes.rules:
            one, other = operands_of(node)[-2:]
            if other in weights and one not in weights:
                labels = _PRODUCTS[node.target]
                rule = axes.rules[node]
                known = [axes.under(node, rule, x) for x in labels if x in rule.sizes]
                yield node, tuple(a for under in known for a in under)

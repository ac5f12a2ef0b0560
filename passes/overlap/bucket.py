"""Joins transfers that are needed, or ready, one after another: each start of a transfer costs the link's latency.

*Contract.* On entry every parameter is gathered and every gradient reduced by a transfer of its own. On exit starts of
the same `bucket` are side by side, and code generation makes one coalesced collective of them, where the transport can:
no tensor is copied.

A bucket has one phase, one dtype and one mesh dimension, and never spans two layers: what ZeRO-3 releases after a layer
is not held for the next one. It grows until the latency is 5% of its transfer (or to the bytes that the plan says), so
most consist of a few small tensors and a large one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from torch import fx

from zgraph.passes.analysis.costs import CPU, Costs, Link, size_of
from zgraph.passes.analysis.parameter_collectives import ParameterCollective, gathers_of, layers_of, reductions_of
from zgraph.passes.contract import graph_pass
from zgraph.passes.overlap.follow_order import Start
from zgraph.program import collectives
from zgraph.program.groups import ranks_in
from zgraph.program.node import Role, info, set_info, tensor
from zgraph.program.program import Fact, Program

LATENCY_SHARE = 0.05


@dataclass(frozen=True)
class BucketOptions:
    """Options of `bucket`."""

    gather: int | None = None  # bytes that a bucket of gathers grows to, None: by the link
    reduce: int | None = None  # bytes that a bucket of reductions grows to, None: by the link
    costs: Costs = field(default_factory=lambda: Costs(CPU))  # has the latency and bandwidth of the links
    # another program's order: gradients of one layer that are ready in another order there (the weight before the bias
    # of a norm) are in a bucket as there
    order: tuple[Start, ...] = ()


@graph_pass(
    "bucket",
    "small transfers of a layer become one",
    options=BucketOptions,
    requires=(Fact.SHARDED, Fact.REDUCED),
    provides=(Fact.BUCKETED,),
    conflicts=(Fact.BUCKETED,),
)
def bucket(program: Program, options: BucketOptions) -> dict[str, int]:
    layers = layers_of(program)
    gathers = sorted(gathers_of(program), key=_first_reader)
    reductions = reductions_of(program)
    groups = [_grown(list(g), options.gather, options, program) for g in _alike(gathers, layers)]
    buckets = [b for group in groups for b in group]
    for number, members in enumerate(buckets):
        _join(members, f"gathers{number}", _together_before)
    ends = {t.last for t in reductions}
    chained: dict[fx.Node | None, ParameterCollective] = {
        t.source: t for t in reductions if t.source in ends
    }  # reductions over a second dimension, by the first reduction's last node
    later: list[list[ParameterCollective]] = []
    for stage in ([t for t in reductions if t.source not in ends], list(chained.values())):
        stage.sort(key=lambda t: t.start)
        ordered = [_as_in(options.order, g) for g in _alike(stage, layers)]
        grown = [b for g in ordered for b in _grown(g, options.reduce, options, program)]
        for members in grown:
            _join(members, f"reductions{len(later)}", lambda members: _together_after(members, chained))
            later.append(members)
    return {
        "gathers": len(gathers),
        "gather_buckets": len(buckets),
        "reductions": len(reductions),
        "reduction_buckets": len(later),
    }


def _first_reader(gather: ParameterCollective) -> fx.Node:
    return min(gather.readers(), default=gather.last)


def _alike(transfers: Iterable[ParameterCollective], layers: dict[str, str]) -> list[list[ParameterCollective]]:
    """Return runs of transfers, in their order, that may share a bucket."""
    groups: list[list[ParameterCollective]] = []
    last: tuple[object, ...] | None = None
    for transfer in transfers:
        start = transfer.start
        key = (info(start).phase, info(start).mesh_dim, start.target, tensor(start).dtype, _layer(transfer, layers))
        if key != last or not _joins(start):
            groups.append([])
        groups[-1].append(transfer)
        last = key
    return groups


def _as_in(order: Sequence[Start], reductions: list[ParameterCollective]) -> list[ParameterCollective]:
    """Return reductions of one layer in the order of another program, where one is followed."""
    names = [(start.group, name) for start in order if start.reduces for name in start.names]
    position = {name: at for at, name in enumerate(names)}
    return sorted(reductions, key=lambda t: position.get((collectives.group_of(t.start), t.name), len(names)))


def _joins(start: fx.Node) -> bool:
    """Return whether a start may be in a bucket with others: an all_to_all may not, nor a gather of a mean."""
    return start.target in collectives.COALESCED and not (
        info(start).role is Role.REDUCE and collectives.kind(start) == "all_gather"
    )


def _layer(transfer: ParameterCollective, layers: dict[str, str]) -> str:
    return layers.get(transfer.name, transfer.name.rpartition(".")[0])


def _grown(
    transfers: list[ParameterCollective], wanted: int | None, options: BucketOptions, program: Program
) -> list[list[ParameterCollective]]:
    group = str(info(transfers[0].start).mesh_dim)
    sizes = [max(size_of(t.wait), size_of(t.start.all_input_nodes[0])) for t in transfers]
    rest = iter(transfers)
    ranks = ranks_in(group, program.mesh)
    return [list(islice(rest, n)) for n in cut(sizes, wanted, options.costs.hardware.link(group), ranks)]


def cut(sizes: Sequence[int], wanted: int | None, link: Link, ranks: int) -> list[int]:
    """Return how many members each bucket of a run has. `sizes` are the members' bytes, `wanted` the bytes that a
    bucket grows to.

    With `wanted` None it grows until the link's latency is a small part of the transfer; members left over join the
    last bucket.
    """
    if wanted == 0:
        return [1] * len(sizes)
    enough = int(link.latency * link.bandwidth / LATENCY_SHARE) * ranks
    counts = [0]
    size = 0
    for mine in sizes:
        if wanted is not None and counts[-1] and size + mine > wanted:
            counts.append(0)
            size = 0
        counts[-1] += 1
        size += mine
        if wanted is None and size >= enough:
            counts.append(0)
            size = 0
    if not counts[-1]:
        counts.pop()
    elif wanted is None and len(counts) > 1 and size < enough:
        rest = counts.pop()
        counts[-1] += rest
    return counts


def _join(members: list[ParameterCollective], name: str, together: Callable[[list[ParameterCollective]], None]) -> None:
    if len(members) == 1:
        return
    together(members)
    for member in members:
        set_info(member.start, info(member.start).replace(bucket=name))


def _together_before(members: list[ParameterCollective]) -> None:
    """Move all starts to the first one: gathers start from shards, which are available at any time."""
    first = min(members, key=lambda t: t.start)
    _place(first.before[0].prev if first.before else first.start.prev, members)


def _together_after(members: list[ParameterCollective], chained: dict[fx.Node | None, ParameterCollective]) -> None:
    """Move all starts to the last one, and after them their waits and the reductions that start from these."""
    last = max(members, key=lambda t: t.start)
    cursor = _place(last.before[0].prev if last.before else last.start.prev, members)
    for member in members:
        if member.wait < cursor:
            behind = [member.wait, *member.after]
            while (following := chained.get(behind[-1])) is not None:
                behind += following.nodes
            for node in behind:
                cursor.append(node)
                cursor = node


def _place(cursor: fx.Node, members: list[ParameterCollective]) -> fx.Node:
    """Put what the members' operands need, then their starts, after `cursor`; return the last start."""
    moved = [n for m in members for n in m.before] + [m.start for m in members]
    while cursor in moved:
        cursor = cursor.prev
    for node in moved:
        cursor.append(node)
        cursor = node
    return cursor

"""Activations that each of several ranks would save whole for the backward are saved in parts (partition_activations of
DeepSpeed, after ZeRO-R: Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models").

*Contract.* On entry the ranks of a mesh dimension compute the program together, and the saved values are decided. On
exit a rank keeps an equal part of the elements of each saved value that is the same on all these ranks:

    x  ->  part, behind its last reader in the forward          part  ->  all_gather -> wait -> x, before its first reader in the backward

Which values are the same follows from the graph: inputs are, but for the parts that ranks hold of divided weights and
for a rank's position; so are values that are computed from these alone, and the results of an all_gather or an
all_reduce over these ranks. All others differ between ranks already, and stay as they are. A gather starts just early
enough that no reader waits for it, with at most the bytes of two of the largest values in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from zgraph.passes.analysis.costs import CPU, Costs, most_bytes
from zgraph.passes.analysis.saved_values import Crossing, crossings, made_by_forward, part_phases
from zgraph.passes.contract import graph_pass
from zgraph.passes.offload.offload import Move, place
from zgraph.program import collectives
from zgraph.program.aliases import aliases_of
from zgraph.program.node import NodeInfo, Phase, Role, info, tensor
from zgraph.program.program import TENSOR_DIM, Fact, InputRole, Port, Program
from zgraph.program.remark import Remark
from zgraph.program.sizes import part_of, stand_in
from zgraph.program.transfers import mark_exchange

aten = torch.ops.aten

_CAST = torch.ops.prims.convert_element_type.default

SMALL = 0.01
"""The share of the bytes that all ranks save alike, in the smallest values, that stays whole: many gathers for little memory."""


@dataclass(frozen=True)
class PartitionOptions:
    """Options of `partition_activations`."""

    dim: str = TENSOR_DIM  # the mesh dimension whose ranks share values
    costs: Costs = field(default_factory=lambda: Costs(CPU))  # say how long operators and gathers take


@graph_pass(
    "partition_activations",
    "ranks that would keep the same activations keep a part of them each",
    options=PartitionOptions,
    requires=(Fact.DIVIDED, Fact.REDUCED),
    provides=(Fact.PARTITIONED,),
    conflicts=(Fact.SCHEDULED,),
)
def partition_activations(program: Program, options: PartitionOptions) -> dict[str, int]:
    ranks = program.mesh.get(options.dim, 1)
    if ranks == 1:
        return {}
    part_phases(program)
    same = same_on_all(program, options.dim)
    received = set(program.input_nodes(InputRole.RECEIVED).values())
    candidates = [c for c in crossings(program) if c.root in same and (c.root in received or made_by_forward(c.root))]
    worth = _worthwhile(candidates)
    divisible = [c for c in worth if stand_in(tensor(c.root).numel()) % ranks == 0]
    program.remarks += [_indivisible(c, options.dim, ranks) for c in worth if c not in divisible]
    if not divisible:
        return {"gathers": 0, "whole_bytes": 0, "kept_bytes": 0}
    position = program.position(options.dim, "partition_activations")
    gathers = [_partition(program, c, position, options, ranks) for c in divisible]
    seconds = options.costs.compute(program)
    place(program, Phase.BACKWARD, gathers, [], seconds, staging=2 * max(g.bytes for g in gathers))
    whole = sum(g.bytes for g in gathers)
    return {"gathers": len(gathers), "whole_bytes": whole, "kept_bytes": whole // ranks}


def same_on_all(program: Program, dim: str) -> set[fx.Node]:
    """Return the nodes whose values are the same on all ranks of a mesh dimension."""
    same_nodes: set[fx.Node] = set()
    ports = dict(zip(program.placeholders(), program.inputs, strict=True))
    for node in program.graph.nodes:
        if node in ports:
            same = not _is_own(program, ports[node], dim)
        elif collectives.is_start(node) and collectives.group_of(node) == dim:
            same = collectives.kind(node) in ("all_gather", "all_reduce")
        else:
            same = node.op != "output" and same_nodes.issuperset(node.all_input_nodes)
        if same:
            same_nodes.add(node)
    return same_nodes


def _is_own(program: Program, port: Port, dim: str) -> bool:
    """Return whether each rank has a value of its own at this input."""
    if port.role is InputRole.RANK_INDEX:
        return port.name == dim
    division = program.params[port.name].division if port.name in program.params else None
    return division is not None and division.mesh_dim == dim


def _worthwhile(crossings: list[Crossing]) -> list[Crossing]:
    """Return all but the smallest of these values, in their order."""
    room = SMALL * sum(most_bytes(c.root) for c in crossings)
    small: set[Crossing] = set()
    for crossing in sorted(crossings, key=lambda c: most_bytes(c.root)):
        room -= most_bytes(crossing.root)
        if room < 0:
            break
        small.add(crossing)
    return [c for c in crossings if c not in small]


def _partition(program: Program, crossing: Crossing, position: fx.Node, options: PartitionOptions, ranks: int) -> Move:
    root, first = crossing.root, crossing.first
    shape, stride = tensor(root).shape, tensor(root).stride()
    order = sorted(range(len(shape)), key=lambda d: (-stride[d], d))
    record = info(root).replace(
        role=Role.COMPUTE, param=None, copy_of=None, made_by="partition_activations", transfer=None
    )
    with program.graph.inserting_before(first):
        cut = list(_cut(program, root, order, position, record, ranks))
        there = record.replace(phase=Phase.BACKWARD, module=info(first).module)
        over = there.replace(role=Role.EXCHANGE, mesh_dim=options.dim, stream=f"comm:{options.dim}")
        start = program.call(collectives.ALL_GATHER, (cut[-1], ranks, options.dim), over, name=f"gather_{root.name}")
        wait = program.call(collectives.WAIT, (start,), over.replace(role=Role.WAIT), name=f"whole_{root.name}")
        mark_exchange(start)
        mark_exchange(wait)
        back = program.call(aten.view.default, (wait, [shape[d] for d in order]), there, name=f"back_{root.name}")
        if tensor(root).dtype is torch.bool:
            back = program.call(_CAST, (back, torch.bool), there, name=f"true_{root.name}")
        if order != sorted(order):
            back = program.call(
                aten.permute.default, (back, list(map(order.index, sorted(order)))), there, name="turned"
            )
    crossing.read_instead(program, back, "partition_activations")
    _behind_last_reader(program, root, cut)
    return Move(start, wait, most_bytes(root), options.costs.transfer([start], ranks))


def _cut(
    program: Program, root: fx.Node, order: list[int], position: fx.Node, record: NodeInfo, ranks: int
) -> Iterator[fx.Node]:
    """Yield the nodes that make this rank's part of the elements, in their order in memory; the last of these nodes is
    the part.
    """
    elements = part_of(tensor(root).numel(), ranks)
    rows = root
    if order != sorted(order):
        yield (rows := program.call(aten.permute.default, (root, order), record, name=f"rows_{root.name}"))
    if (
        tensor(rows).dim() != 1
    ):  # (torch's view as [ranks, …] would split the first dimension, whether or not ranks divide it)
        yield (
            rows := program.call(aten.view.default, (rows, [tensor(root).numel()]), record, name=f"flat_{root.name}")
        )
    yield (parts := program.call(aten.view.default, (rows, [ranks, elements]), record, name=f"parts_{root.name}"))
    yield (mine := program.call(aten.index.Tensor, (parts, [position]), record, name=f"mine_{root.name}"))
    yield (part := program.call(aten.view.default, (mine, [elements]), record, name=f"part_{root.name}"))
    if tensor(root).dtype is torch.bool:  # (Inductor would send each as an int64)
        yield program.call(_CAST, (part, torch.uint8), record, name=f"bytes_{root.name}")


def _behind_last_reader(program: Program, root: fx.Node, cut: list[fx.Node]) -> None:
    """Move the nodes that make a part after the forward's last reader of the whole, which is free from there on."""
    readers = [root, *(n for alias in aliases_of(root) for n in alias.users if n not in cut)]
    at = max(program.behind(n) for n in readers if n.op != "output" and info(n).phase is Phase.FORWARD)
    for node in cut:
        at.append(node)
        at = node


def _indivisible(crossing: Crossing, dim: str, ranks: int) -> Remark:
    root = crossing.root
    return Remark(
        "partition_activations",
        root.name,
        f"{root.name} is kept whole on each rank of {dim!r}",
        f"its {tensor(root).numel()} elements are no multiple of {ranks}",
        0.0,
        "sizes of the batch that these ranks divide",
    )

"""Each gradient leaves averaged over the data-parallel ranks, in the layout of its parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from zgraph.errors import PlanError
from zgraph.passes.contract import graph_pass
from zgraph.passes.zero.gathers import cast_to, identifier_of, inverse_of, stored_order
from zgraph.program import collectives
from zgraph.program.node import NodeInfo, Phase, Role, info, tensor
from zgraph.program.program import DATA_DIMS, Fact, InputRole, Level, OutputRole, ParamSpec, Port, Program
from zgraph.program.transfers import mark_transfers

aten = torch.ops.aten


@dataclass(frozen=True)
class ReduceOptions:
    """Options of `reduce_gradients`."""

    reduce: bool = True  # false leaves each gradient as this rank's own, for a later program to add and reduce
    # whether unreduced gradients of earlier micro-batches come in and are added before the reduction
    accumulated: bool = False
    in_groups: bool = False  # whether groups of ranks, over the last of the data dimensions, train by themselves


@graph_pass(
    "reduce_gradients",
    "gradients are averaged over the data-parallel ranks as soon as they are made",
    options=ReduceOptions,
    requires=(Fact.SHARDED,),
    conflicts=(Fact.REDUCED,),
    provides=(Fact.REDUCED,),
    level=Level.DISTRIBUTED,
)
def reduce_gradients(program: Program, options: ReduceOptions) -> dict[str, int]:
    items: list[tuple[Port, fx.Node]] = []
    pending: list[fx.Node] = []  # waits of the reduction in flight, to be moved before the start of the next one
    scattered = reduced = 0
    grads = {
        p.name: n for p, n in program.output_items() if p.role is OutputRole.GRADIENT and p.of is InputRole.PARAMETER
    }
    final: dict[str, fx.Node] = {}
    built: dict[fx.Node | None, fx.Node] = {}  # the last node built after each gradient: parameters may share one
    dims = [d for d in (DATA_DIMS[:-1] if options.in_groups else DATA_DIMS) if program.mesh.get(d, 1) > 1]
    if dims:
        _refuse_sparse(grads)
    for name, grad in sorted(grads.items(), key=lambda item: item[1]):
        spec = program.params[name]
        at = None if grad.op == "placeholder" else grad
        with program.graph.inserting_after(built.get(at, at or program.placeholders()[-1])):
            anchor = program.graph.call_function(torch.ops.aten.sym_size.int, ())  # where to build, removed below
        before = anchor.prev
        with program.graph.inserting_before(anchor):
            record = NodeInfo(
                phase=Phase.BACKWARD,
                module=info(grad).module,
                source=info(grad).source,
                param=name,
                made_by="reduce_gradients",
            )
            node = grad
            if options.accumulated:
                node = _accumulate(program, node, spec, record)
            starts: list[fx.Node] = []
            if options.reduce:
                node, starts, scatter = _reduce(program, node, spec, record, dims)
                scattered += scatter
                reduced += len(starts) - scatter
            node = _leave(program, node, spec, record)
            mark_transfers(_between(before, anchor))
            if starts and pending:
                for wait in pending:
                    starts[0].prepend(wait)
            if options.reduce:
                pending = _between(starts[0], anchor) if len(starts) == 1 else []
            if node is not grad:
                built[at] = starts[0] if options.reduce and pending else node
        program.graph.erase_node(anchor)
        final[name] = node
    output = program.output_node()
    for wait in pending:
        output.prepend(wait)
    for port, node in program.output_items():
        items.append(
            (port, final[port.name]) if port.role is OutputRole.GRADIENT and port.name in final else (port, node)
        )
    program.set_outputs(items)
    if not options.reduce:
        program.facts.add(Fact.PARTIAL.value)
    if options.in_groups:
        program.facts.add(Fact.IN_GROUPS.value)
    return {"reduce_scatters": scattered, "all_reduces": reduced}


def _refuse_sparse(grads: Mapping[str, fx.Node]) -> None:
    """Raise `PlanError` for a sparse gradient."""
    for name, grad in grads.items():
        if tensor(grad).layout is not torch.strided:
            raise PlanError(
                f"the gradient of {name} is sparse, and ranks average whole tensors",
                where=info(grad).source or None,
                hint="leave out sparse=True of the embedding, or train on one rank",
            )


def _accumulate(program: Program, grad: fx.Node, spec: ParamSpec, record: NodeInfo) -> fx.Node:
    """Add earlier micro-batches' gradients: held (* loss scale) + grad, in the gradients' dtype. The held sum is not
    scaled.
    """
    slug = identifier_of(spec.name)
    with program.fake_mode:
        fake = torch.empty_strided(spec.shape, tensor(grad).stride(), dtype=spec.grad_dtype, device=tensor(grad).device)
    mine = record.replace(role=Role.ACCUMULATE)
    node = program.add_input(Port(InputRole.ACCUMULATOR, spec.name), fake, mine, name=f"accumulated_{slug}")
    scale = program.input_nodes(InputRole.SCALE).get("loss_scale")
    if scale is not None:
        node = program.call(aten.mul.Tensor, (node, scale), mine, name=f"rescaled_{slug}")
    wide = cast_to(program, grad, spec.grad_dtype, mine, f"wide_{slug}")
    return program.call(aten.add.Tensor, (node, wide), mine, name=f"sum_{slug}")


def _leave(program: Program, node: fx.Node, spec: ParamSpec, record: NodeInfo) -> fx.Node:
    """Build (cast ->) (/ loss scale), and return the gradient as it leaves the program."""
    layout, slug = record.replace(role=Role.LAYOUT), identifier_of(spec.name)
    node = cast_to(program, node, spec.grad_dtype, layout, f"kept_grad_{slug}")
    scale = program.input_nodes(InputRole.SCALE).get("loss_scale")
    if scale is not None:
        node = program.call(aten.div.Tensor, (node, scale), layout, name=f"unscaled_grad_{slug}")
    return node


def _reduce(
    program: Program, grad: fx.Node, spec: ParamSpec, record: NodeInfo, dims: Sequence[str]
) -> tuple[fx.Node, list[fx.Node], int]:
    """Build the reduction of a gradient over mesh dimensions; return (the reduced gradient, the starts of its collectives, 1 if it is
    scattered).
    """
    slug = identifier_of(spec.name)
    layout = record.replace(role=Role.LAYOUT)
    order = stored_order(spec)
    node = grad
    starts: list[fx.Node] = []
    if not dims:
        return node, starts, 0
    node = cast_to(program, node, spec.reduce_dtype, layout, f"cast_grad_{slug}")
    if order != sorted(order):
        node = program.call(aten.permute.default, (node, order), layout, name=f"packed_grad_{slug}")
    if not tensor(node).is_contiguous():
        node = program.call(
            aten.clone.default,
            (node,),
            layout,
            kwargs={"memory_format": torch.contiguous_format},
            name=f"dense_grad_{slug}",
        )
    scatter = 0
    for dim in dims:
        ranks = program.mesh[dim]
        here = record.replace(role=Role.REDUCE, mesh_dim=dim, stream=f"comm:{dim}")
        if dim == spec.shard_dim:
            missing = spec.rows * ranks - spec.shape[0]
            if missing:
                pad = [0, 0] * (len(spec.shape) - 1) + [0, missing]
                node = program.call(aten.constant_pad_nd.default, (node, pad), layout, name=f"padded_grad_{slug}")
            node = program.call(
                collectives.REDUCE_SCATTER, (node, "avg", ranks, dim), here, name=f"scatter_grad_{slug}"
            )
            scatter = 1
        else:
            node = program.call(collectives.ALL_REDUCE, (node, "avg", dim), here, name=f"reduce_grad_{slug}")
        starts.append(node)
        node = program.call(
            collectives.WAIT, (node,), record.replace(role=Role.WAIT, mesh_dim=dim), name=f"grad_{slug}"
        )
    if order != sorted(order):
        node = program.call(aten.permute.default, (node, inverse_of(order)), layout, name=f"unpacked_grad_{slug}")
    return node, starts, scatter


def _between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """Return the nodes after `first` and before `last`."""
    nodes = []
    while (first := first.next) is not last:
        nodes.append(first)
    return nodes

"""ZeRO as four passes over the joint graph (after Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models").

*Contract.* On entry the program is the plain single-device graph: parameters are whole, gradients are this rank's.
On exit every sharded parameter enters as this rank's padded shard (or, where an earlier program of the same step
gathered it, whole), and every gradient leaves averaged over the data-parallel ranks, in the layout of its parameter.

    shard_parameters    p[n, …]            ->  shard[rows, …] -> all_gather -> wait (-> slice to n) before its first use
    regather            uses in backward   ->  a second gather, before the first of them           (stage 3)
    keep_gathered       the gathered value becomes an output, or comes in as an input              (stages 1 and 2)
    reduce_gradients    grad[n, …]         ->  (pad ->) reduce_scatter "avg" -> wait -> [rows, …]; all_reduce where
                                               the parameter is whole, and over `replicate`

Sharding is on dimension 0 in rows = ceil(n / ranks), padded at the end: a gather lands in the whole parameter and a
reduce-scatter reads the gradient, both without a copy where ranks divide n.
"""

from __future__ import annotations

import torch
from torch import fx

from zgraph.passes.contract import graph_pass
from zgraph.passes.zero.gathers import (
    add_gather,
    cast_to,
    identifier_of,
    inverse_of,
    record_for,
    stored_order,
    stored_shape,
)
from zgraph.program.node import Role, info, set_info, tensor
from zgraph.program.program import Fact, InputRole, Level, ParamSpec, Program

aten = torch.ops.aten


@graph_pass(
    "shard_parameters",
    "parameters enter as shards and are gathered before their first use",
    requires=(Fact.CLEAN,),
    provides=(Fact.SHARDED,),
    conflicts=(Fact.SHARDED,),
    level=Level.DISTRIBUTED,
)
def shard_parameters(program: Program) -> dict[str, int]:
    gathers = gathered_bytes = 0
    for name, node in program.input_nodes(InputRole.PARAMETER).items():
        spec = program.params[name]
        if not node.users or (spec.shard_dim is None and spec.compute_dtype is spec.dtype):
            continue
        users = sorted(node.users)
        phase = info(users[0]).phase
        _enter(program, node, spec)
        with program.graph.inserting_before(users[0]):
            if spec.shard_dim is None:
                base = record_for(spec, phase, users[0])
                whole = cast_to(
                    program, node, spec.compute_dtype, base.replace(role=Role.LAYOUT), f"cast_{identifier_of(name)}"
                )
            else:
                whole = add_gather(program, node, spec, phase, like=users[0])
                gathers += 1
                gathered_bytes += spec.numel * spec.compute_dtype.itemsize
        for user in users:
            user.replace_input_with(node, whole)
    return {"gathers": gathers, "gathered_bytes": gathered_bytes}


def _enter(program: Program, node: fx.Node, spec: ParamSpec) -> None:
    """Give a parameter's placeholder the shape and dtype in which a rank stores it."""
    device = tensor(node).device
    with program.fake_mode:
        if spec.shard_dim is None:
            node.meta["val"] = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
        else:
            storage = torch.empty(stored_shape(spec.shard_shape, spec), dtype=spec.dtype, device=device)
            node.meta["val"] = storage.permute(inverse_of(stored_order(spec)))
    set_info(node, info(node).replace(param=spec.name))

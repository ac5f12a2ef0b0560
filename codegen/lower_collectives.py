"""Rewrites a program's collectives and offload transfers for the backends that run them.

A bucket becomes one coalesced collective: one launch over NCCL, and no tensor is copied for it.

Over gloo the functional gather and reduce-scatter are coalesced ones of one tensor, and gloo's coalesced collectives
corrupt memory when another runs beside them (torch 2.13: of two ranks that kept eight gathers in flight one died
within 40 s, twice out of twice; see also pytorch#65231). Its other ones do not: 186,000 gathers into a tensor of the
caller's and 441,000 all-reduces side by side ended well. So over gloo no bucket is joined, a gather is zgraph's own
operator, and a reduce-scatter is an all-reduce of which each rank keeps its part.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import cast

import torch
from torch import fx

from zgraph.passes.analysis.simulator import bucket_of
from zgraph.program import collectives, transfers_to_host
from zgraph.program.node import info, set_info, tensor
from zgraph.program.program import Program
from zgraph.torch_compat import fx_graphs, process_groups

aten = torch.ops.aten


def has_own_rank(text: str, backends: Collection[str]) -> bool:
    """Return whether code over groups of these backends has this rank's number in it; `text` is the program's JSON
    form."""
    ranked = [collectives.SHIFT, *([collectives.REDUCE_SCATTER] if "gloo" in backends else [])]
    return any(f'"{target}"' in text for target in ranked)


def fit(program: Program, groups: dict[str, str]) -> None:
    """Rewrite a program that is about to be compiled for the backends of its process groups.

    Names of process groups (by mesh dimension, or part of one) and of stores (by tier) are put in. Nodes keep their
    names: errors and the order that is read back from generated code name the same ones.
    """
    for start in [n for n in program.graph.nodes if collectives.is_start(n)]:
        if start._erased:
            continue
        bucket = bucket_of(start)
        name = groups.get(collectives.group_of(start), collectives.group_of(start))
        backend, rank = process_groups.backend_of(name, tensor(start).device)
        if start.target is collectives.SHIFT:
            _as_all_to_all(program, start, name, rank)
            continue
        for member in bucket:
            collectives.set_group(member, name)
        if backend == "gloo":
            for member in bucket:
                if member.target is collectives.REDUCE_SCATTER:
                    _as_all_reduce(program, member, rank)
                elif member.target is collectives.ALL_GATHER:
                    member.target = collectives.GATHER_APART
        elif len(bucket) > 1:
            _coalesce(program, bucket)
    for node in program.nodes:
        if node.target is transfers_to_host.OFFLOAD:
            node.update_arg(1, groups.get(str(node.args[1]), str(node.args[1])))
            fx_graphs.fix_strides(transfers_to_host.moved_value(node))
        elif node.target is transfers_to_host.MOVED:
            _in_place(program, node)


def _in_place(program: Program, wait: fx.Node) -> None:
    """Replace a wait by an operator that writes to the value in place: readers of the value then stay behind it,
    whatever is fused."""
    start = wait.all_input_nodes[0]
    with program.graph.inserting_before(wait):
        landed = program.call(transfers_to_host.MOVED_IN_PLACE, wait.args, info(wait), name="landed")
    wait.replace_all_uses_with(start)
    name = wait.name
    program.graph.erase_node(wait)
    landed.name = name


def _as_all_to_all(program: Program, start: fx.Node, group: str, rank: int) -> None:
    """Replace a shift by an all-to-all: all rows are sent to one rank, the next for a distance of 1, and received from one before."""
    operand, ranks = start.args[0], cast(int, start.args[1])
    distance = collectives.distance_of(start)
    rows = tensor(start).shape[0]
    sent, received = (
        [rows if r == other % ranks else 0 for r in range(ranks)] for other in (rank + distance, rank - distance)
    )
    with program.graph.inserting_before(start):
        all_to_all = program.call(
            collectives.ALL_TO_ALL, (operand, received, sent, group), info(start), name=f"{start.name}_sent"
        )
    start.replace_all_uses_with(all_to_all)
    name = start.name
    program.graph.erase_node(start)
    all_to_all.name = name


def _as_all_reduce(program: Program, start: fx.Node, rank: int) -> None:
    rows, wait = tensor(start).shape[0], collectives.wait_of(start)
    assert wait is not None, start.name
    whole, op, _, group = start.args
    with program.graph.inserting_before(start):
        reduced = program.call(collectives.ALL_REDUCE, (whole, op, group), info(start), name=f"{start.name}_whole")
    wait.meta["val"] = reduced.meta["val"]
    with program.graph.inserting_after(wait):
        part = program.call(aten.slice.Tensor, (wait, 0, rank * rows, (rank + 1) * rows), info(wait), name="part")
    start.replace_all_uses_with(reduced)
    program.graph.erase_node(start)
    reduced.name = start.name
    part.meta["val"] = part.meta["val"].contiguous()
    with program.graph.inserting_after(part):  # (a copy of its own: a view would keep the whole alive)
        mine = program.call(aten.clone.default, (part,), info(wait), name="own")
    wait.replace_all_uses_with(mine, delete_user_cb=lambda user: user is not part)


def _coalesce(program: Program, bucket: list[fx.Node]) -> None:
    target, rest = collectives.COALESCED[bucket[0].target], bucket[0].args[1:]  # type: ignore[index]
    values = [tensor(member) for member in bucket]
    with program.graph.inserting_before(bucket[0]):
        joint = program.graph.call_function(target, ([m.args[0] for m in bucket], *rest))
        joint.meta["val"] = values
        set_info(joint, info(bucket[0]))
        for at, member in enumerate(bucket):
            part = program.graph.call_function(operator.getitem, (joint, at))
            part.meta["val"] = values[at]
            set_info(part, info(member))
            member.replace_all_uses_with(part)
    for member in bucket:
        program.graph.erase_node(member)
    joint.name = bucket[0].name

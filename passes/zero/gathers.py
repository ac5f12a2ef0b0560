"""Builds the gathers of parameters, and finds them in a program."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

from zgraph.passes.analysis.parameter_collectives import gathers_of
from zgraph.program import collectives
from zgraph.program.node import NodeInfo, Phase, Role, info, tensor
from zgraph.program.program import ParamSpec, Program
from zgraph.program.transfers import mark_transfers

aten = torch.ops.aten


def gathered(program: Program, phase: Phase) -> dict[str, fx.Node]:
    """Return the whole value of each parameter that this phase gathers, by name: the last node of its gather."""
    return {g.name: g.last for g in gathers_of(program) if info(g.start).phase is phase}


# -- building -------------------------------------------------------------------------------------------------------
def identifier_of(name: str) -> str:
    return re.sub(r"\W+", "_", name)


def stored_order(spec: ParamSpec) -> list[int]:
    """Return the dimensions in their order in memory (channels-last weights differ from 0, 1, 2, …)."""
    inner = sorted(range(1, len(spec.shape)), key=lambda d: (-spec.stride[d], d))
    return [0, *inner] if spec.shape else []


def inverse_of(order: list[int]) -> list[int]:
    return [order.index(d) for d in range(len(order))]


def stored_shape(shape: tuple[int, ...], spec: ParamSpec) -> list[int]:
    return [shape[d] for d in stored_order(spec)]


def add_gather(program: Program, shard: fx.Node, spec: ParamSpec, phase: Phase, like: fx.Node) -> fx.Node:
    """Build (cast ->) all_gather -> wait (-> slice) (-> permute), and return the whole parameter. `like` is its first
    user.
    """
    base = record_for(spec, phase, like)
    layout = base.replace(role=Role.LAYOUT)
    slug = identifier_of(spec.name) + ("" if phase is Phase.FORWARD else "_again")
    order = stored_order(spec)
    node = cast_to(program, shard, spec.compute_dtype, layout, f"cast_{slug}")
    if spec.shard_dim is None:
        return node  # (it is not sharded)
    new_nodes = [node] if node is not shard else []

    def call(target: object, args: tuple[Any, ...], record: NodeInfo, name: str) -> fx.Node:
        new_nodes.append(program.call(target, args, record, name=f"{name}_{slug}"))
        return new_nodes[-1]

    dim, ranks = spec.shard_dim, program.mesh[spec.shard_dim]
    if order != sorted(order):
        node = call(aten.permute.default, (node, order), layout, "packed")
    over = base.replace(role=Role.GATHER, mesh_dim=dim, stream=f"comm:{dim}")
    start = call(collectives.ALL_GATHER, (node, ranks, dim), over, "gather")
    node = call(collectives.WAIT, (start,), base.replace(role=Role.WAIT, mesh_dim=dim), "whole")
    if spec.rows * ranks != spec.shape[0]:
        node = call(aten.slice.Tensor, (node, 0, 0, spec.shape[0]), layout, "cut")
    if order != sorted(order):
        node = call(aten.permute.default, (node, inverse_of(order)), layout, "unpacked")
    mark_transfers(new_nodes)
    return node


def record_for(spec: ParamSpec, phase: Phase, like: fx.Node) -> NodeInfo:
    module, source = info(like).module, info(like).source
    return NodeInfo(phase, module=module, source=source, param=spec.name, made_by="shard_parameters")


def cast_to(program: Program, node: fx.Node, dtype: torch.dtype, record: NodeInfo, name: str) -> fx.Node:
    if tensor(node).dtype is dtype:
        return node
    return program.call(torch.ops.prims.convert_element_type.default, (node, dtype), record, name=name)

"""Rules about collectives: where they may be, that each is waited for once, over which ranks it runs, and what they add up to."""

from __future__ import annotations

from typing import Any

from torch import fx

from zgraph.errors import MeshError
from zgraph.passes.verifier.faults import Faults, awaited_once, fault
from zgraph.program import collectives, transfers_to_host
from zgraph.program.block_quantization import MEAN_OF_BLOCKS
from zgraph.program.groups import dim_of, ranks_in
from zgraph.program.node import Phase, Role, has_info, info, value
from zgraph.program.program import DATA_DIMS, Fact, InputRole, Level, OutputRole, Program


def check_pure(program: Program) -> Faults:
    """Check that a captured program has no collective."""
    if program.level > Level.CAPTURED:
        return
    for node in program.graph.nodes:
        if collectives.is_start(node) or collectives.is_wait(node):
            yield fault(
                program,
                node,
                f"node {node.name!r} communicates in a captured program",
                "collectives come with the distributed level",
            )


def check_waits(program: Program) -> Faults:
    """Check that each start of a collective is waited for exactly once, and that nothing else reads it."""
    handed_on: set[fx.Node] = set()
    if program.level is Level.EXECUTABLE:  # the next program waits for these
        roles = (OutputRole.SAVED, OutputRole.IN_FLIGHT)
        handed_on = {n for p, n in program.output_items() if p.role in roles}
        handed_on -= {n for p, n in program.output_items() if p.role not in roles}
    for node in program.graph.nodes:
        if collectives.is_start(node):
            waits = [u for u in node.users if collectives.is_wait(u)]
            yield from awaited_once(program, node, waits, "collective", handed_on=node in handed_on)
        if collectives.is_wait(node) and not _starts(node.args[0], program):
            yield fault(
                program,
                node,
                f"node {node.name!r} waits for no collective",
                f"{node.args[0]} starts none (or was waited for already)",
            )


def _starts(node: Any, program: Program) -> bool:
    """Return whether a node starts a collective, or brings in one that an earlier program started."""
    if not isinstance(node, fx.Node):
        return False
    came_in = node.op == "placeholder" and info(node).role in (Role.GATHER, Role.REDUCE)
    return collectives.is_start(node) or (came_in and program.level is Level.EXECUTABLE)


def check_groups(program: Program) -> Faults:
    """Check that each collective runs over the mesh dimension, or the part of one, that its role and parameter say,
    with its number of ranks.
    """
    for node in program.graph.nodes:
        if not collectives.is_start(node):
            continue
        record, group = info(node), collectives.group_of(node)
        try:
            ranks = ranks_in(group, program.mesh)
        except MeshError as error:
            what = f"collective {node.name!r} runs over the wrong group {group!r}"
            yield fault(program, node, what, f"{error.what}: {error.why}")
            continue
        if group != record.mesh_dim:
            yield fault(
                program,
                node,
                f"collective {node.name!r} runs over the wrong group {group!r}",
                f"its record says {record.mesh_dim!r}, the mesh has {list(program.mesh)}",
            )
        size = collectives.group_size_of(node)
        if size is not None and size != ranks:
            yield fault(program, node, f"collective {node.name!r} states {size} ranks", f"group {group!r} has {ranks}")
        if record.param is None or record.role not in (Role.GATHER, Role.REDUCE):
            continue
        spec = program.params[record.param]
        over = {spec.shard_dim}
        if record.role is Role.GATHER and record.phase is not Phase.UPDATE and dim_of(group) == spec.shard_dim:
            over.add(group)  # (gathers of secondary shards run over the ranks of one host)
        if record.role is Role.GATHER and record.phase is Phase.UPDATE and spec.division is not None:
            over.add(spec.division.mesh_dim)  # (an optimizer may need whole matrices)
        if (record.role is Role.GATHER or node.target is collectives.REDUCE_SCATTER) and group not in over:
            yield fault(
                program,
                node,
                f"collective {node.name!r} runs over the wrong group {group!r}",
                f"parameter {spec.name!r} is sharded over {spec.shard_dim!r}",
            )
        if record.role is Role.GATHER:
            shard = node.all_input_nodes[0]
            while shard.op != "placeholder" and info(shard).role is Role.LAYOUT and shard.all_input_nodes:
                shard = shard.all_input_nodes[0]
            if shard.op == "placeholder" and info(shard).param != spec.name:
                yield fault(
                    program,
                    node,
                    f"collective {node.name!r} gathers {shard.name!r}",
                    f"it is to gather parameter {spec.name!r}",
                )
        averages = record.role is Role.REDUCE and record.phase is Phase.BACKWARD
        if averages and not _is_averaged(node):
            yield fault(
                program,
                node,
                f"gradient reduction {node.name!r} does not average",
                f"it does {collectives.reduce_op_of(node)!r}: gradients would grow with the number of ranks",
            )


def _is_averaged(start: fx.Node) -> bool:
    """Return whether the ranks' gradients are averaged: by the collective, or by the operator that reads what each rank
    has sent.
    """
    wait = collectives.wait_of(start)
    if start.target is collectives.ALL_TO_ALL and wait is not None:
        return bool(wait.users) and all(user.target is MEAN_OF_BLOCKS for user in wait.users)
    if start.target is collectives.ALL_GATHER:  # (it gathers shards of a mean that was reduced before)
        return True
    return collectives.reduce_op_of(start) == "avg"


_SERVING = (Role.WAIT, Role.LAYOUT, Role.REDUCE)


def check_reductions(program: Program) -> Faults:
    """Check that each parameter's gradient is averaged over every data dimension exactly once, and scattered where the
    parameter is sharded. Groups of ranks that train by themselves send each other nothing.
    """
    if Fact.REDUCED not in program.facts or Fact.PARTIAL in program.facts:
        return
    averaged = DATA_DIMS[:-1] if Fact.IN_GROUPS in program.facts else DATA_DIMS
    needed = sorted(d for d in averaged if program.mesh.get(d, 1) > 1)
    for port, node in program.output_items():
        if port.role is not OutputRole.GRADIENT or port.of is not InputRole.PARAMETER:
            continue
        dims: list[str] = []
        at = node
        while (
            has_info(at)
            and (info(at).role in _SERVING or transfers_to_host.is_host_transfer(at))
            and at.all_input_nodes
        ):
            if info(at).role is Role.REDUCE and at.target is not collectives.ALL_GATHER:  # (which only gathers a mean)
                dims.append(str(info(at).mesh_dim))
            at = at.all_input_nodes[0]
        if sorted(dims) != needed:
            yield fault(
                program,
                node,
                f"gradient {port.name!r} ({node.name!r}) is not averaged over the data-parallel ranks",
                f"it is reduced over {dims}, the mesh needs {needed}",
            )


def check_buckets(program: Program) -> Faults:
    """Check that the starts of a bucket are side by side and have one kind, one mesh dimension and one dtype."""
    last: dict[str, fx.Node] = {}
    for node in program.graph.nodes:
        if not collectives.is_start(node) or (name := info(node).bucket) is None:
            continue
        before = last.get(name)
        last[name] = node
        if before is None:
            continue
        alike = [(n.target, collectives.group_of(n), value(n).dtype) for n in (before, node)]
        if before.next is not node or alike[0] != alike[1]:
            yield fault(
                program,
                node,
                f"collective {node.name!r} does not fit its bucket {name!r}",
                f"{before.name!r} is in it, and {'is of another kind' if before.next is node else 'stands elsewhere'}",
            )


def check_ahead(program: Program) -> Faults:
    """Check that nodes which run before the forward read shards of parameters alone."""
    shards = set(program.input_nodes(InputRole.PARAMETER).values())
    for node in program.graph.nodes:
        if node.op != "call_function" or not info(node).ahead:
            continue
        wrong = next((a for a in node.all_input_nodes if a not in shards and not info(a).ahead), None)
        if wrong is not None:
            yield fault(
                program,
                node,
                f"node {node.name!r} runs ahead of the forward and reads {wrong.name!r}",
                "only shards are there before the forward",
            )

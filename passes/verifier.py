"""Checks a program against the invariants of its level; runs after capture and after every pass.

Each rule is one function over the program that yields a `VerifyError` for each node at fault. A fault is shown with the nodes around it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from zgraph.errors import MeshError, VerifyError
from zgraph.program import collectives, ops, transfers_to_host
from zgraph.program.aliases import is_random, is_write, mutates, root_of
from zgraph.program.groups import ranks_in
from zgraph.program.node import Phase, Role, has_info, info, tensors, value
from zgraph.program.program import DATA_DIMS, InputRole, Level, OutputRole, Port, Program

AROUND = 5  # nodes shown on each side of a fault

Faults = Iterator[VerifyError]


def fault(program: Program, node: fx.Node | None, what: str, why: str) -> VerifyError:
    name = node.name if node is not None else None
    where = None
    if node is not None:
        nodes = program.nodes
        at = nodes.index(node) if node in nodes else 0
        lines = [f"{'>' if n is node else ' '} {n.format_node()}" for n in nodes[max(0, at - AROUND) : at + AROUND + 1]]
        source = info(node).source if has_info(node) else ""
        where = "\n".join([*([source] if source else []), f"program {program.name!r}, node {name!r}:", *lines])
    return VerifyError(
        what,
        where=where,
        why=why,
        hint="the pass that ran last made this program; its options or its code are wrong",
        node=name,
    )


# -- structure ------------------------------------------------------------------------------------------------------
def check_order(program: Program) -> Faults:
    """Every value is defined before it is used (so there is no cycle), and every node has its record."""
    seen: set[fx.Node] = set()
    for node in program.graph.nodes:
        for used in node.all_input_nodes:
            if used not in seen:
                yield fault(
                    program,
                    node,
                    f"node {node.name!r} uses {used.name!r} before it is defined",
                    "the order is broken or the graph has a cycle",
                )
        if node.op != "output" and not has_info(node):
            yield fault(
                program,
                node,
                f"node {node.name!r} has no record",
                "a pass inserted it without saying what it is",
            )
        seen.add(node)


def check_phases(program: Program) -> Faults:
    """The forward uses nothing of the backward."""
    for node in program.graph.nodes:
        if node.op == "output" or info(node).phase is not Phase.FORWARD:
            continue
        for used in node.all_input_nodes:
            if info(used).phase is Phase.BACKWARD:
                yield fault(
                    program,
                    node,
                    f"node {node.name!r} of the forward uses {used.name!r} of the backward",
                    "a forward value can't wait for the backward",
                )


def check_ports(program: Program) -> Faults:
    """Inputs and outputs are what their roles say: count, phase, shape and dtype."""
    placeholders, results = program.placeholders(), program.output_values()
    if len(placeholders) != len(program.inputs):
        yield fault(
            program,
            None,
            "inputs and their roles differ in number",
            f"{len(placeholders)} placeholders, {len(program.inputs)} roles",
        )
        return
    if len(results) != len(program.outputs):
        yield fault(
            program,
            None,
            "outputs and their roles differ in number",
            f"{len(results)} outputs, {len(program.outputs)} roles",
        )
        return
    for port, node in program.input_items():
        if port.role is InputRole.PARAMETER and program.level >= Level.DISTRIBUTED and node.users:
            spec = program.params[port.name]
            if "divided" in program.facts and "sharded" not in program.facts:
                yield from _same_tensor(program, node, value(node), spec.shape, spec.compute_dtype)
            else:
                yield from _same_tensor(program, node, value(node), spec.shard_shape, spec.dtype)
        if port.role is InputRole.UNSHARDED:
            spec = program.params[port.name]
            yield from _same_tensor(program, node, value(node), spec.shape, spec.compute_dtype)
        if port.role is InputRole.GRADIENT:
            spec = program.params[port.name]
            yield from _same_tensor(program, node, value(node), spec.shard_shape, spec.grad_dtype)
        if port.role in (
            InputRole.PARAMETER,
            InputRole.UNSHARDED,
            InputRole.ACCUMULATOR,
            InputRole.GRADIENT,
            InputRole.IN_FLIGHT,
        ):
            yield from _serves(program, node, port, "inputs")
        if port.role is InputRole.TANGENT and info(node).phase is not Phase.BACKWARD:
            yield fault(program, node, f"tangent {node.name!r} is not of the backward", "its record was changed")
    for port, node in program.output_items():
        phase = info(node).phase
        if port.role in (OutputRole.OUTPUT, OutputRole.MUTATION, OutputRole.UNSHARDED) and phase is Phase.BACKWARD:
            yield fault(
                program,
                node,
                f"{port.role} {port.name!r} comes from the backward node {node.name!r}",
                "outputs were exchanged",
            )
        if port.role is OutputRole.CHECK and node.target is not ops.CHECK:
            yield fault(
                program,
                node,
                f"check {port.name!r} is made by {node.name!r}, which checks nothing",
                "outputs were exchanged",
            )
        if port.role is OutputRole.UNSHARDED:
            yield from _serves(program, node, port, "outputs")
            spec = program.params[port.name]
            yield from _same_tensor(program, node, value(node), spec.shape, spec.compute_dtype)
        if port.role is OutputRole.MUTATION and port.of in (InputRole.PARAMETER, InputRole.GRADIENT):
            spec = program.params[port.name]
            dtype = spec.dtype if port.of is InputRole.PARAMETER else spec.grad_dtype
            yield from _serves(program, node, port, "outputs")
            yield from _same_tensor(program, node, value(node), spec.shard_shape, dtype)
        if port.role is OutputRole.GRADIENT:
            if (
                phase is not Phase.BACKWARD
                and program.level < Level.EXECUTABLE
                and node.op != "placeholder"
                and node.all_input_nodes
            ):
                yield fault(
                    program,
                    node,
                    f"gradient {port.name!r} comes from the forward node {node.name!r}",
                    "outputs were exchanged",
                )
            yield from _serves(program, node, port, "outputs")
            if port.of is InputRole.PARAMETER:
                spec = program.params[port.name]
                done = "reduced" in program.facts
                shape = spec.shard_shape if done and "partial" not in program.facts else spec.shape
                shape = spec.whole_shape if program.level is Level.CAPTURED else shape
                yield from _same_tensor(
                    program, node, value(node), shape, spec.grad_dtype if done else spec.compute_dtype
                )


def _serves(program: Program, node: fx.Node, port: Port, ports: str) -> Faults:
    served = info(node).param
    if served is not None and served != port.name:
        yield fault(
            program,
            node,
            f"{port.role} {port.name!r} is {node.name!r}, which serves {served!r}",
            f"{ports} were exchanged",
        )


def _same_tensor(
    program: Program, node: fx.Node, val: Any, shape: tuple[int, ...], dtype: torch.dtype | None
) -> Faults:
    if not isinstance(val, torch.Tensor):
        yield fault(program, node, f"node {node.name!r} is no tensor", f"it is {type(val).__name__}")
        return
    if tuple(val.shape) != tuple(shape) or (dtype is not None and val.dtype != dtype):
        yield fault(
            program,
            node,
            f"node {node.name!r} has the wrong type",
            f"it is {val.dtype}{list(val.shape)}; its role needs {dtype or val.dtype}{list(shape)}",
        )


# -- values ---------------------------------------------------------------------------------------------------------
class ValueCache:
    """Remembers what operators give for arguments of given types: equal layers are evaluated once."""

    def __init__(self) -> None:
        self.known: dict[Any, Any] = {}


def check_values(program: Program, cache: ValueCache) -> Faults:
    """Each node's recorded value is what its operator's fake implementation gives for its arguments."""
    for node in program.graph.nodes:
        if node.op != "call_function" or (
            not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem
        ):
            continue
        if node.target is operator.getitem:
            expected = _type(value(node.args[0])[node.args[1]])
        else:
            key = (node.target, _key(node.args), _key(tuple(sorted(node.kwargs.items()))))
            if key not in cache.known:
                try:
                    cache.known[key] = _type(program.evaluate(node))
                except Exception as error:
                    yield fault(
                        program,
                        node,
                        f"node {node.name!r} can't be evaluated",
                        f"{type(error).__name__}: {error}",
                    )
                    continue
            expected = cache.known[key]
        if _type(value(node)) != expected:
            yield fault(
                program,
                node,
                f"node {node.name!r} has the wrong value",
                f"it is recorded as {_type(value(node))}; its operator gives {expected}",
            )


def _key(arg: Any) -> Any:
    if isinstance(arg, fx.Node):
        val = value(arg)
        return ("attr", arg.target) if val is None else _type(val)
    if isinstance(arg, (tuple, list)):
        return tuple(_key(a) for a in arg)
    if isinstance(arg, dict):
        return tuple((k, _key(v)) for k, v in sorted(arg.items()))
    return (type(arg).__name__, str(arg))


def _type(val: Any) -> Any:
    if isinstance(val, torch.Tensor):
        # The stride of a dimension of size 1 means nothing, and operators disagree about it.
        strides = tuple(s if n != 1 else 0 for s, n in zip(val.stride(), val.shape, strict=True)) if val.numel() else ()
        return (val.dtype, tuple(val.shape), strides, str(val.device))
    if isinstance(val, (tuple, list)):
        return tuple(_type(v) for v in val)
    return type(val).__name__


# -- collectives ----------------------------------------------------------------------------------------------------
def check_pure(program: Program) -> Faults:
    """A captured program has no collective."""
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
    """Each start of a collective is waited for exactly once, and nothing else reads it."""
    handed_on: set[fx.Node] = set()
    if program.level is Level.EXECUTABLE:  # the next program waits for these
        roles = (OutputRole.SAVED, OutputRole.IN_FLIGHT)
        handed_on = {n for p, n in program.output_items() if p.role in roles}
        handed_on -= {n for p, n in program.output_items() if p.role not in roles}
    for node in program.graph.nodes:
        if collectives.is_start(node):
            waits = [u for u in node.users if collectives.is_wait(u)]
            yield from _awaited_once(program, node, waits, "collective", handed_on=node in handed_on)
        if collectives.is_wait(node) and not _starts(node.args[0], program):
            yield fault(
                program,
                node,
                f"node {node.name!r} waits for no collective",
                f"{node.args[0]} starts none (or was waited for already)",
            )


def _awaited_once(program: Program, start: fx.Node, waits: list[fx.Node], what: str, *, handed_on: bool) -> Faults:
    """One of `waits` waits for this start, and nothing else reads it. What is `handed_on` leaves the program, and may have none."""
    if len(waits) != 1 and not (handed_on and not waits):
        yield fault(
            program,
            start,
            f"{what} {start.name!r} is waited for {len(waits)} times",
            "each start has exactly one wait",
        )
    others = [u for u in start.users if u not in waits and not (handed_on and u.op == "output")]
    if others:
        yield fault(
            program,
            others[0],
            f"node {others[0].name!r} reads {start.name!r} without waiting for it",
            "its bytes have not arrived there",
        )


def _starts(node: Any, program: Program) -> bool:
    """Does this node start a collective, or bring in one that an earlier program started?"""
    if not isinstance(node, fx.Node):
        return False
    came_in = node.op == "placeholder" and info(node).role in (Role.GATHER, Role.REDUCE)
    return collectives.is_start(node) or (came_in and program.level is Level.EXECUTABLE)


def check_moves(program: Program) -> Faults:
    """Each start of a move is waited for once, by a wait that keeps what it moves; nothing else reads what is on its way."""
    for node in program.graph.nodes:
        if transfers_to_host.is_start(node):
            waits = [u for u in node.users if transfers_to_host.is_wait(u)]
            # (another part of the update may wait for it)
            handed_on = program.level is Level.EXECUTABLE and not waits and program.output_node() in node.users
            yield from _awaited_once(program, node, waits, "move", handed_on=handed_on)
            if waits and waits[0].args[1] is not transfers_to_host.moved_value(node):
                yield fault(
                    program,
                    waits[0],
                    f"{waits[0].name!r} lets go of what {node.name!r} moves",
                    "its memory could be used again before the move is over",
                )
        came_in = (
            program.level is Level.EXECUTABLE and node.all_input_nodes and node.all_input_nodes[0].op == "placeholder"
        )
        if (
            transfers_to_host.is_wait(node)
            and not transfers_to_host.is_start(transfers_to_host.start_of(node))
            and not came_in
        ):
            yield fault(program, node, f"node {node.name!r} waits for no move", f"{node.args[0]} starts none")
        if "offloaded" in program.facts and node.op == "call_function" and not transfers_to_host.is_move(node):
            away = next((a for a in node.all_input_nodes if info(a).home is not None and not _on_host(node, a)), None)
            if away is not None:
                yield fault(
                    program,
                    node,
                    f"node {node.name!r} reads {away.name!r}, which lies in {info(away).home}",
                    "only a fetch brings it to the device",
                )


def _on_host(node: fx.Node, read: fx.Node) -> bool:
    """Do a node of an update and what it reads both stand in the host's memory?"""
    there = all(t.device.type == "cpu" for t in tensors(node))
    return info(node).phase is Phase.UPDATE and info(read).home == "cpu" and there


def check_groups(program: Program) -> Faults:
    """Each collective runs over the mesh dimension, or the part of one, that its role and its parameter say, with that many ranks."""
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
        if record.role is Role.GATHER and record.phase is Phase.UPDATE and spec.division is not None:
            over.add(spec.division.mesh_dim)  # (for an optimizer that takes whole matrices)
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
        if averages and collectives.reduce_op_of(node) != "avg":
            yield fault(
                program,
                node,
                f"gradient reduction {node.name!r} does not average",
                f"it does {collectives.reduce_op_of(node)!r}: gradients would grow with the number of ranks",
            )


_SERVING = (Role.WAIT, Role.LAYOUT, Role.REDUCE)


def check_reductions(program: Program) -> Faults:
    """Each parameter's gradient is averaged over every data dimension, each once, and scattered where it is sharded."""
    if "reduced" not in program.facts or "partial" in program.facts:
        return
    needed = sorted(d for d in DATA_DIMS if program.mesh.get(d, 1) > 1)
    for port, node in program.output_items():
        if port.role is not OutputRole.GRADIENT or port.of is not InputRole.PARAMETER:
            continue
        dims: list[str] = []
        at = node
        while has_info(at) and (info(at).role in _SERVING or transfers_to_host.is_move(at)) and at.all_input_nodes:
            if info(at).role is Role.REDUCE:
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
    """The starts of a bucket stand side by side and are of one kind, over one mesh dimension, in one dtype."""
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
    """What runs before the forward reads parameters' shards alone."""
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


# -- lifetimes ------------------------------------------------------------------------------------------------------
def check_releases(program: Program) -> Faults:
    """Nothing reads a gathered buffer, or a view of it, after its release; each is released at most once."""
    released: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        for used in node.all_input_nodes:
            root = root_of(used)
            if root in released:
                yield fault(
                    program,
                    node,
                    f"node {node.name!r} reads {used.name!r} after its release",
                    f"{released[root].name!r} released {root.name!r}",
                )
        if node.op == "call_function" and node.target is ops.RELEASE:
            buffer = node.args[0]
            if not (
                isinstance(buffer, fx.Node)
                and collectives.is_wait(buffer)
                and info(collectives.start_of(buffer)).role is Role.GATHER
            ):
                yield fault(
                    program,
                    node,
                    f"node {node.name!r} releases {buffer}, which was not gathered",
                    "only gathered buffers are released",
                )
            released[buffer] = node


def check_random(program: Program) -> Faults:
    """No random operator is repeated: it would draw other numbers."""
    for node in program.graph.nodes:
        if node.op != "output" and info(node).copy_of is not None and is_random(node):
            yield fault(
                program,
                node,
                f"random operator {node.name!r} repeats {info(node).copy_of!r}",
                "it would draw other numbers than the forward did",
            )


def check_mutation(program: Program) -> Faults:
    """No operator writes to its arguments, but an update's last step: it writes an input that nothing reads after it (or what was
    fetched of one, which is then stored)."""
    written: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        for used in node.all_input_nodes:
            root = root_of(used)
            if root in written and not (transfers_to_host.is_move(node) and used.op != "placeholder"):
                yield fault(
                    program,
                    node,
                    f"node {node.name!r} reads {root.name!r} after it was written",
                    f"{written[root].name!r} put its new value there",
                )
        if is_write(node):
            written[node.all_input_nodes[0]] = node
        elif mutates(node):
            yield fault(
                program,
                node,
                f"node {node.name!r} changes its argument",
                f"{node.target} writes in place; programs are functional",
            )


Rule = Callable[[Program], Faults]
RULES: tuple[Rule, ...] = (
    check_order,
    check_phases,
    check_ports,
    check_pure,
    check_waits,
    check_moves,
    check_groups,
    check_reductions,
    check_buckets,
    check_ahead,
    check_releases,
    check_random,
    check_mutation,
)


def all_faults(program: Program, values: ValueCache | None = None) -> Faults:
    """Yield each fault of a program, in the order of the rules. What a fault makes other rules trip over is not listed: they end there."""
    cache = values or ValueCache()
    found = False
    for rule in (*RULES, lambda program: check_values(program, cache)):
        try:
            for error in rule(program):
                found = True
                yield error
        except Exception:
            if not found:
                raise
        if found and rule is check_order:
            return


def verify_program(program: Program, values: ValueCache | None = None) -> None:
    """Raise `VerifyError`, naming the node, unless the program keeps every invariant of its level. Its `others` are all further faults.

    `values` remembers operators that were evaluated before: give the same one to successive calls over one program.
    """
    faults = all_faults(program, values)
    first = next(faults, None)
    if first is not None:
        first.others = tuple(faults)
        raise first


def verify_ranks(programs: Sequence[Program]) -> None:
    """Raise `VerifyError` unless all ranks run the same collectives in the same order on each group."""
    lists = [[n for n in p.graph.nodes if collectives.is_start(n) or collectives.is_wait(n)] for p in programs]
    for rank, (program, nodes) in enumerate(zip(programs, lists, strict=True)):
        for mine, first in zip(nodes, lists[0], strict=False):
            if (mine.name, _signature(mine)) != (first.name, _signature(first)):
                raise fault(
                    program,
                    mine,
                    f"rank {rank} and rank 0 communicate in different order: {mine.name!r} against {first.name!r}",
                    "ranks that disagree wait for each other for ever",
                )
        if len(nodes) != len(lists[0]):
            longer = max(nodes, lists[0], key=len)
            odd = longer[min(len(nodes), len(lists[0]))]
            raise fault(
                program,
                odd,
                f"rank {rank} has {len(nodes)} collective nodes, rank 0 has {len(lists[0])}; the first extra is {odd.name!r}",
                "ranks that disagree wait for each other for ever",
            )


def _signature(node: fx.Node) -> tuple[Any, ...]:
    return (
        str(node.target),
        _type(value(node)),
        collectives.group_of(node) if collectives.is_start(node) else "",
    )

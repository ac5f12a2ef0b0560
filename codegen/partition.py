"""Splits a finished joint program, once, into a forward and a backward program.

Passes have already said which phase each node belongs to, so the split decides nothing: what the backward reads of
the forward is saved, placeholders that both read are inputs of both.

    ahead:    shards                                 -> gathers on their way, one program for each bucket
    forward:  parameters, buffers, inputs, gathers   -> outputs, mutations, kept weights, saved values
    backward: saved values, inputs, tangents, sums   -> gradients, values for earlier pipeline stages

or, of a backward that is split `apart`,

    inputs:   as the backward                        -> values for earlier stages, saved values
    weights:  those, and as the backward             -> gradients
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from zgraph.errors import CaptureError
from zgraph.passes.analysis.parameter_collectives import ParameterCollective, gathers_of
from zgraph.program import collectives, ops
from zgraph.program.aliases import is_view
from zgraph.program.node import NodeInfo, Phase, info, set_info
from zgraph.program.program import InputRole, Level, OutputRole, Port, Program, of_backward
from zgraph.program.sizes import NO_SIZES, is_symbolic
from zgraph.torch_compat import fx_graphs

_BACKWARD_ONLY = (
    InputRole.TANGENT,
    InputRole.ACCUMULATOR,
    InputRole.SCALE,
    InputRole.RETURNED,
    InputRole.RESIDUAL,
    InputRole.DRAWS,
)


@dataclass
class Parts:
    """The executable programs of one joint program."""

    forward: Program  # the forward
    backward: Program | None  # the backward, or the first of its two parts; None for a forward without gradients
    ahead: tuple[Program, ...] = ()  # programs that run before the forward, in order
    weights: Program | None = None  # the second part of a backward that was split `apart`: the gradients of the weights


def split(program: Program, *, apart: bool = False) -> Parts:
    """Split `program`, which is not changed. Raises `CaptureError` if a value that crosses to the backward is no
    tensor.

    With `apart` the backward becomes two parts: the first computes what earlier pipeline stages wait for, the second
    the gradients of the weights, and takes from the first what both read (Qi et al., 2023, "Zero Bubble Pipeline
    Parallelism"). Where no stage waits, there is no first part.
    """
    joint = program.snapshot()
    ahead = _cut_ahead(joint)
    gradients = [item for item in joint.output_items() if of_backward(*item)]
    results = [item for item in joint.output_items() if not of_backward(*item)]
    unsharded_ports = {node: port for port, node in results if port.role is OutputRole.UNSHARDED}
    backward_nodes = [
        n for n in joint.graph.nodes if n.op not in ("placeholder", "output") and info(n).phase is Phase.BACKWARD
    ]
    crossing = _crossing(joint, backward_nodes, [node for _, node in gradients])
    ports = dict(zip(joint.placeholders(), joint.inputs, strict=True))
    crossing = _protect_mutated(joint, crossing, ports, backward_nodes, gradients)
    crossing = _look_again(joint, crossing)
    saved = [n for n in crossing if n.op != "placeholder" and n not in unsharded_ports]
    saved.sort(key=lambda n: n.name)  # (variants of a program may have views at other positions)
    forward = _extract(
        joint,
        "forward",
        inputs=[(ports[n], n) for n in joint.placeholders() if ports[n].role not in _BACKWARD_ONLY],
        outputs=[*results, *((Port(OutputRole.SAVED, n.name), n) for n in saved)],
    )
    if not gradients:
        return Parts(forward, None, ahead)
    backward_inputs: list[tuple[Port, fx.Node]] = [(Port(InputRole.SAVED, n.name), n) for n in saved]
    backward_inputs += [
        (Port(InputRole.UNSHARDED, unsharded_ports[n].name), n) for n in crossing if n in unsharded_ports
    ]
    backward_inputs += [
        (ports[n], n) for n in crossing if n.op == "placeholder" and ports[n].role is not InputRole.SIZE
    ]
    backward_inputs += [(p, n) for n, p in ports.items() if p.role in _BACKWARD_ONLY or p.role is InputRole.SIZE]
    if apart:
        first, second = _apart(joint, backward_inputs, gradients)
        return Parts(forward, first, ahead, second)
    return Parts(forward, _extract(joint, "backward", inputs=backward_inputs, outputs=gradients), ahead)


def _apart(
    joint: Program, taken: list[tuple[Port, fx.Node]], gradients: list[tuple[Port, fx.Node]]
) -> tuple[Program | None, Program | None]:
    """Return the two parts of the backward: what computes the values for earlier stages, and what computes the
    gradients of the weights.

    `taken` are the inputs of both together.
    """
    back = [item for item in gradients if item[0].role is OutputRole.RETURNED]
    own = [item for item in gradients if item[0].role is not OutputRole.RETURNED]
    given = {n for _, n in taken}
    of_inputs = _needed([n for _, n in back], given, joint, Phase.BACKWARD)
    of_inputs |= {u for n in of_inputs for u in n.users if u.target is operator.getitem}
    # (views, constants and sizes are computed a second time, and not handed over)
    again = {n for n in of_inputs if is_view(n) or n.op == "get_attr" or is_symbolic(n.meta.get("val"))}
    of_weights = _needed([n for _, n in own], given | of_inputs - again, joint, Phase.BACKWARD)
    read = {a for n in of_weights for a in n.all_input_nodes} | {n for _, n in own}
    handed = dict.fromkeys(sorted(read & of_inputs - of_weights - given))
    handed |= {n.all_input_nodes[0]: None for n in handed if collectives.is_start(n)}  # (lives until it is waited for)

    def wanted(nodes: set[fx.Node], results: list[tuple[Port, fx.Node]]) -> list[tuple[Port, fx.Node]]:
        reads = {a for n in nodes for a in n.all_input_nodes} | {n for _, n in results}
        return [(p, n) for p, n in taken if n in reads or p.role is InputRole.SIZE]

    between = [(Port(OutputRole.SAVED, n.name), n) for n in handed]
    coming = [(Port(InputRole.SAVED, n.name), n) for n in handed]
    first = second = None
    if back:
        first = _extract(joint, "inputs", wanted(of_inputs, back), [*back, *between], Phase.BACKWARD)
    if own:
        second = _extract(joint, "weights", [*coming, *wanted(of_weights, own)], own, Phase.BACKWARD)
    return first, second


def _cut_ahead(joint: Program) -> tuple[Program, ...]:
    """Take the gathers that start before the forward out of `joint`, which gets them as inputs instead; return their
    programs."""
    buckets: dict[str, list[ParameterCollective]] = {}
    for gather in gathers_of(joint):
        if info(gather.start).ahead:
            buckets.setdefault(info(gather.start).bucket or gather.start.name, []).append(gather)
    ports = dict(zip(joint.placeholders(), joint.inputs, strict=True))
    programs = []
    for number, gathers in enumerate(buckets.values()):
        shards = dict.fromkeys(gather.operand for gather in gathers)
        outputs = [(Port(OutputRole.IN_FLIGHT, gather.name), gather.start) for gather in gathers]
        programs.append(_extract(joint, f"ahead{number}", [(ports[n], n) for n in shards], outputs, Phase.FORWARD))
    for gather in (gather for gathers in buckets.values() for gather in gathers):
        start = gather.start
        port = Port(InputRole.IN_FLIGHT, gather.name)
        new_input = joint.add_input(port, start.meta["val"], info(start), name=start.name)
        start.replace_all_uses_with(new_input)
        for node in reversed([*gather.before, start]):
            joint.graph.erase_node(node)
    return tuple(programs)


def _crossing(joint: Program, backward: list[fx.Node], gradients: list[fx.Node]) -> list[fx.Node]:
    """Return the forward's nodes that the backward reads, in graph order.

    A release does not count as reading: the buffer of a kept weight is released with the view that the backward takes,
    and would outlive it as an input of its own. Arithmetic on sizes is left out, since the backward repeats it.
    """
    crossing: dict[fx.Node, None] = {}
    readers = [n for n in backward if n.target is not ops.RELEASE]
    for node in [*(u for n in readers for u in n.all_input_nodes), *gradients]:
        of_sizes = is_symbolic(node.meta.get("val"))
        if info(node).phase is Phase.FORWARD and node.op != "get_attr" and not of_sizes:
            crossing[node] = None
    for start in [n for n in crossing if collectives.is_start(n)]:  # its operand must live until it is waited for
        operand = start.all_input_nodes[0]
        if operand.op != "placeholder":
            crossing[operand] = None
    for node in crossing:
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise CaptureError(
                "the model turns a tensor into a Python number that its backward needs",
                where=info(node).source or None,
                why=f"value {node.name!r} is known only when the forward runs",
                hint="keep it a tensor (leave out .item(), float(), int())",
            )
    return sorted(crossing)


def _protect_mutated(
    joint: Program,
    crossing: list[fx.Node],
    ports: dict[fx.Node, Port],
    backward: list[fx.Node],
    gradients: list[tuple[Port, fx.Node]],
) -> list[fx.Node]:
    """Save a buffer that the forward updates and the backward reads as it was before the update; return the new
    `crossing`."""
    mutated = {p.name for p in joint.outputs if p.role is OutputRole.MUTATION}
    result = []
    for node in crossing:
        if node.op == "placeholder" and ports[node].name in mutated:
            with joint.graph.inserting_after(joint.placeholders()[-1]):
                copied = joint.call(
                    torch.ops.aten.clone.default,
                    (node,),
                    NodeInfo(Phase.FORWARD, made_by="partition"),
                    name=f"before_{node.name}",
                )
            for user in backward:
                user.replace_input_with(node, copied)
            gradients[:] = [(p, copied if n is node else n) for p, n in gradients]
            node = copied
        result.append(node)
    return result


def _look_again(joint: Program, crossing: list[fx.Node]) -> list[fx.Node]:
    """Repeat views of saved values in the backward instead of saving them too; return the new `crossing`.

    A view that is saved beside its base would be counted twice in the bytes of the backward's inputs.
    """
    saved = {n for n in crossing if n.op != "placeholder"} - {n for _, n in joint.output_items()}
    for node in [n for n in crossing if n in saved and is_view(n)]:
        chain = [node]
        while (base := chain[-1].all_input_nodes[0]) not in saved and base.op != "placeholder" and is_view(base):
            chain.append(base)
        readers = sorted(u for u in node.users if info(u).phase is Phase.BACKWARD and u.target is not ops.RELEASE)
        if base not in saved or not readers:
            continue
        copies: dict[fx.Node, fx.Node] = {}
        with joint.graph.inserting_before(readers[0]):
            for link in reversed(chain):
                copies[link] = joint.repeat(link, copies, "partition")
        for user in readers:
            user.replace_input_with(node, copies[node])
        saved.discard(node)
        crossing = [n for n in crossing if n is not node]
    return crossing


def _extract(
    joint: Program,
    name: str,
    inputs: list[tuple[Port, fx.Node]],
    outputs: list[tuple[Port, fx.Node]],
    phase: Phase | None = None,
) -> Program:
    phase = phase or Phase(name)
    graph = fx.Graph()
    memo: dict[fx.Node, fx.Node] = {}
    for _, node in inputs:
        memo[node] = graph.placeholder(node.name)
        memo[node].meta = dict(node.meta)
    needed = _needed([n for _, n in outputs], set(memo), joint, phase)
    for node in joint.graph.nodes:
        if node in needed and node not in memo:
            memo[node] = graph.node_copy(node, lambda n: memo[n])
            memo[node].meta = dict(node.meta)
    result = graph.output(tuple(memo[n] for _, n in outputs))
    set_info(result, NodeInfo(phase))
    part = Program(
        name=f"{joint.name}.{name}",
        module=fx_graphs.lazy_module(joint.module, graph),
        inputs=[p for p, _ in inputs],
        outputs=[p for p, _ in outputs],
        mesh=dict(joint.mesh),
        params=dict(joint.params),
        fake_mode=joint.fake_mode,
        level=Level.EXECUTABLE,
        facts=set(joint.facts),
        sizes=joint.sizes if any(p.role is InputRole.SIZE for p, _ in inputs) else NO_SIZES,
    )
    part.recompile()
    return part


def _needed(roots: list[fx.Node], given: set[fx.Node], joint: Program, phase: Phase) -> set[fx.Node]:
    marks = [n for n in joint.graph.nodes if n.target is ops.RELEASE and info(n).phase is phase]
    stack = list(roots)
    needed: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in needed or node in given:
            continue
        needed.add(node)
        stack.extend(node.all_input_nodes)
    return needed | {m for m in marks if all(a in needed for a in m.all_input_nodes)}

"""The rule about ports: what the value of each input and output must be, by its role, as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from zgraph.passes.verifier.faults import Faults, fault
from zgraph.program import ops
from zgraph.program.block_quantization import FROM_BLOCKS, SENDERS
from zgraph.program.node import Phase, info, value
from zgraph.program.program import Fact, InputRole, Level, OutputRole, ParamSpec, Port, Program
from zgraph.program.sizes import static

Type = tuple[tuple[int, ...], torch.dtype]
"""A shape and a dtype."""


def _stored(program: Program, node: fx.Node, spec: ParamSpec) -> Type | None:
    """Return the type of a parameter as an input: as programs compute with it before `shard_parameters`, as a rank
    stores it after.
    """
    if program.level < Level.DISTRIBUTED or not node.users:
        return None
    if Fact.DIVIDED in program.facts and Fact.SHARDED not in program.facts:
        return spec.shape, spec.compute_dtype
    return spec.shard_shape, spec.dtype


def _whole(program: Program, node: fx.Node, spec: ParamSpec) -> Type:
    return spec.shape, spec.compute_dtype


def _new_weight(program: Program, node: fx.Node, spec: ParamSpec) -> Type:
    return spec.shard_shape, spec.dtype


def _stored_gradient(program: Program, node: fx.Node, spec: ParamSpec) -> Type:
    return spec.shard_shape, spec.grad_dtype


def _gradient(program: Program, node: fx.Node, spec: ParamSpec) -> Type:
    """Return the type of a gradient as an output: this rank's own before `reduce_gradients`, then reduced, and
    scattered unless it is partial.
    """
    done = Fact.REDUCED in program.facts
    dtype = spec.grad_dtype if done else spec.compute_dtype
    if program.level is Level.CAPTURED:
        return spec.whole_shape, dtype
    return spec.shard_shape if done and Fact.PARTIAL not in program.facts else spec.shape, dtype


@dataclass(frozen=True, slots=True)
class PortRule:
    """What a port with some role must satisfy."""

    # gives the shape and dtype of its value from the layout of the parameter that it is named after
    type: Callable[[Program, fx.Node, ParamSpec], Type | None] | None = None
    # whether a node that serves a parameter has to serve this one
    serves: bool = False
    # the phase that it comes from, except in an update
    phase: Phase | None = None


INPUTS: Mapping[InputRole, PortRule] = {
    InputRole.PARAMETER: PortRule(_stored, serves=True),
    InputRole.UNSHARDED: PortRule(_whole, serves=True),
    InputRole.ACCUMULATOR: PortRule(serves=True),
    InputRole.GRADIENT: PortRule(_stored_gradient, serves=True),
    InputRole.IN_FLIGHT: PortRule(serves=True),
    InputRole.TANGENT: PortRule(phase=Phase.BACKWARD),
    InputRole.RESIDUAL: PortRule(phase=Phase.BACKWARD),
    InputRole.DRAWS: PortRule(phase=Phase.BACKWARD),
}

# By the output's role, and by the role of the input that it changes or is the gradient of (None: any other).
OUTPUTS: Mapping[tuple[OutputRole, InputRole | None], PortRule] = {
    (OutputRole.OUTPUT, None): PortRule(phase=Phase.FORWARD),
    (OutputRole.MUTATION, None): PortRule(phase=Phase.FORWARD),
    (OutputRole.MUTATION, InputRole.PARAMETER): PortRule(_new_weight, serves=True, phase=Phase.FORWARD),
    (OutputRole.MUTATION, InputRole.GRADIENT): PortRule(_stored_gradient, serves=True, phase=Phase.FORWARD),
    (OutputRole.UNSHARDED, None): PortRule(_whole, serves=True, phase=Phase.FORWARD),
    (OutputRole.GRADIENT, None): PortRule(serves=True, phase=Phase.BACKWARD),
    (OutputRole.GRADIENT, InputRole.PARAMETER): PortRule(_gradient, serves=True, phase=Phase.BACKWARD),
}

_ANY = PortRule()


def check_ports(program: Program) -> Faults:
    """Check that inputs and outputs have the number, phase, shape and dtype that their roles say."""
    placeholders, results = program.placeholders(), program.output_values()
    if len(placeholders) != len(program.inputs):
        numbers = f"{len(placeholders)} placeholders, {len(program.inputs)} roles"
        yield fault(program, None, "inputs and their roles differ in number", numbers)
        return
    if len(results) != len(program.outputs):
        numbers = f"{len(results)} outputs, {len(program.outputs)} roles"
        yield fault(program, None, "outputs and their roles differ in number", numbers)
        return
    for port, node in program.input_items():
        yield from _check_input(program, port, node)
    for port, node in program.output_items():
        yield from _check_output(program, port, node)


def _check_input(program: Program, port: Port, node: fx.Node) -> Faults:
    rule = INPUTS.get(port.role, _ANY)  # type: ignore[arg-type]
    if rule.type is not None:
        yield from _same_type(program, node, rule.type(program, node, program.params[port.name]))
    if rule.serves:
        yield from _serves(program, node, port, "inputs")
    if rule.phase is not None and info(node).phase not in (rule.phase, Phase.UPDATE):
        yield fault(program, node, f"{port.role} {node.name!r} is not of the {rule.phase}", "its record was changed")
    if port.few_bits and Fact.COMPRESSED in program.facts:
        readers = [user for user in node.users if user.target is not FROM_BLOCKS]
        if readers:
            what = f"{port.role} {node.name!r} arrives in few bits, and {readers[0].name!r} reads it"
            yield fault(program, node, what, "its value is what from_blocks makes of it")


def _check_output(program: Program, port: Port, node: fx.Node) -> Faults:
    rule = OUTPUTS.get((port.role, port.of)) or OUTPUTS.get((port.role, None), _ANY)  # type: ignore[arg-type]
    yield from _comes_from(program, node, port, rule.phase)
    if port.role is OutputRole.CHECK and node.target is not ops.CHECK:
        what = f"check {port.name!r} is made by {node.name!r}, which checks nothing"
        yield fault(program, node, what, "outputs were exchanged")
    if port.few_bits and Fact.COMPRESSED in program.facts and node.target not in SENDERS:
        what = f"{port.role} {port.name!r} is to leave in few bits, and is {node.name!r}"
        yield fault(program, node, what, "to_blocks makes them")
    if rule.serves:
        yield from _serves(program, node, port, "outputs")
    if rule.type is not None:
        yield from _same_type(program, node, rule.type(program, node, program.params[port.name]))


def _comes_from(program: Program, node: fx.Node, port: Port, phase: Phase | None) -> Faults:
    """Yield a fault for an output of the forward that the backward computes, and for a gradient that the forward
    computes.
    """
    comes = info(node).phase
    if phase is Phase.FORWARD and comes is Phase.BACKWARD:
        what = f"{port.role} {port.name!r} comes from the backward node {node.name!r}"
        yield fault(program, node, what, "outputs were exchanged")
    computed = node.op != "placeholder" and bool(node.all_input_nodes)
    if phase is Phase.BACKWARD and comes is not phase and program.level < Level.EXECUTABLE and computed:
        what = f"{port.role} {port.name!r} comes from the forward node {node.name!r}"
        yield fault(program, node, what, "outputs were exchanged")


def _serves(program: Program, node: fx.Node, port: Port, ports: str) -> Faults:
    served = info(node).param
    if served is not None and served != port.name:
        what = f"{port.role} {port.name!r} is {node.name!r}, which serves {served!r}"
        yield fault(program, node, what, f"{ports} were exchanged")


def _same_type(program: Program, node: fx.Node, needed: Type | None) -> Faults:
    if needed is None:
        return
    (shape, dtype), val = needed, value(node)
    if not isinstance(val, torch.Tensor):
        yield fault(program, node, f"node {node.name!r} is no tensor", f"it is {type(val).__name__}")
    elif tuple(map(static, val.shape)) != tuple(shape) or val.dtype != dtype:
        why = f"it is {val.dtype}{list(val.shape)}; its role needs {dtype}{list(shape)}"
        yield fault(program, node, f"node {node.name!r} has the wrong type", why)

"""Inductor's own joint-graph passes, run as one pass of ours before anything is distributed.

They replace random operators by functions of seeds (so a recomputed dropout draws the same numbers), fold constants and
match attention patterns. Nodes they make get the record of the node they are made from.

*Contract.* A node that stays keeps its record, its fake value and the dtype and strides of its operands. Torch's passes
overwrite the meta data of a replacement with that of the removed node (of a gradient times one, say, over that of a
forward value), and replace a value by one with other strides, or (up to torch 2.11) of another dtype, for which its
readers were not captured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zgraph.passes.contract import graph_pass
from zgraph.program.layout import Strides, has_strides, promised
from zgraph.program.node import NodeInfo, Phase, has_info, info, module_of, set_info, source_of, tensor, value
from zgraph.program.program import Fact, OutputRole, Program
from zgraph.torch_compat import inductor_code

aten, prims = torch.ops.aten, torch.ops.prims

_Form = tuple[torch.dtype | None, Strides | None]


@dataclass
class _Before:
    """The nodes of a program as they were before torch's passes."""

    meta: dict[fx.Node, dict[str, Any]] = field(default_factory=dict)  # the meta data of each node
    operands: dict[fx.Node, list[_Form]] = field(default_factory=dict)  # the dtypes and strides of each node's operands

    @classmethod
    def of(cls, program: Program) -> _Before:
        before = cls()
        for node in program.graph.nodes:
            before.meta[node] = dict(node.meta)
            before.operands[node] = [(getattr(value(a), "dtype", None), promised(a)) for a in _operands(node)]
        return before


@graph_pass(
    "inductor_prepare",
    "Inductor's joint-graph passes: seeds, constants, patterns",
    requires=(Fact.CLEAN,),
    provides=(Fact.INDUCTOR_READY,),
    bitwise=False,
    conflicts=(Fact.SHARDED,),
)
def inductor_prepare(program: Program) -> dict[str, int]:
    before = _Before.of(program)
    inductor_code.inductor_joint_passes(program.module, program.fake_mode, pads=not program.sizes)
    new_count = 0
    forms: dict[Any, fx.Node] = {}
    for node in program.nodes:
        if node in before.meta:
            node.meta = before.meta[node]
            _keep_operands(program, node, before.operands[node], forms)
        else:
            _tell(node)
            node.meta["val"] = program.evaluate(node) if node.op == "call_function" else value(node)
            new_count += 1
    _keep_gradients(program)
    return {"made": new_count, "removed": len(before.meta.keys() - set(program.graph.nodes))}


def _operands(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a node reads, in order; one that it reads twice is listed twice."""
    operands: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), lambda a: operands.append(a) or a)  # type: ignore[func-returns-value]
    return operands


def _tell(node: fx.Node) -> None:
    """Give a node that torch made a record, if it did not get that of the node that it replaces."""
    backward = any(has_info(a) and info(a).phase is Phase.BACKWARD for a in node.all_input_nodes)
    if has_info(node):
        if backward:
            set_info(node, info(node).replace(phase=Phase.BACKWARD))
        return
    backward = backward or node.meta.get("partitioner_tag") == "is_backward"
    phase = Phase.BACKWARD if backward else Phase.FORWARD
    set_info(
        node, NodeInfo(phase, module=module_of(node.meta), source=source_of(node.meta), made_by="inductor_prepare")
    )


def _keep_operands(program: Program, node: fx.Node, wanted: list[_Form], inserted: dict[Any, fx.Node]) -> None:
    """Let a node read each value with the dtype and the strides that it was captured for; `inserted` are the casts and
    copies inserted so far.
    """
    operands = _operands(node)
    if len(operands) != len(wanted):  # (torch's passes rewrote the call)
        if node.op == "call_function":
            node.meta["val"] = program.evaluate(node)
        return
    for operand, (dtype, strides) in dict(zip(operands, wanted, strict=True)).items():
        phase = info(operand if has_info(operand) and (_backward(operand) or node.op == "output") else node).phase
        read = inserted.get((operand, dtype, strides, phase), operand)
        with program.graph.inserting_before(node):
            if dtype is not None and tensor(read).dtype is not dtype:
                read = _cast(program, read, dtype, phase)
            if strides is not None and not has_strides(tensor(read), strides):
                read = _laid_out(program, read, strides, phase)
        if read is not operand:
            inserted[operand, dtype, strides, phase] = read
            node.replace_input_with(operand, read)


def _backward(node: fx.Node) -> bool:
    return has_info(node) and info(node).phase is Phase.BACKWARD


def _cast(program: Program, node: fx.Node, dtype: torch.dtype, phase: Phase) -> fx.Node:
    """Insert a cast of a value."""
    record = info(node).replace(phase=phase, made_by="inductor_prepare")
    return program.call(prims.convert_element_type.default, (node, dtype), record, name=f"{node.name}_cast")


def _laid_out(program: Program, node: fx.Node, strides: Strides, phase: Phase) -> fx.Node:
    """Insert a copy of a value with these strides."""
    val = tensor(node)
    record = info(node).replace(phase=phase, made_by="inductor_prepare")
    like = {"dtype": val.dtype, "device": val.device}
    empty = program.call(
        aten.empty_strided.default, (list(val.shape), list(strides)), record, kwargs=like, name=f"room_for_{node.name}"
    )
    return program.call(aten.copy.default, (empty, node), record, name=f"{node.name}_laid_out")


def _keep_gradients(program: Program) -> None:
    """Copy, in the backward, each gradient that torch's passes have made a value of the forward."""
    items = program.output_items()
    outputs = []
    for port, node in list(items):
        if port.role is OutputRole.GRADIENT and info(node).phase is not Phase.BACKWARD:
            with program.graph.inserting_before(program.output_node()):
                record = info(node).replace(phase=Phase.BACKWARD, made_by="inductor_prepare")
                node = program.call(aten.clone.default, (node,), record, name=f"own_{node.name}")
        outputs.append((port, node))
    program.set_outputs(outputs)

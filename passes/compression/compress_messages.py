"""Pipeline stages send each other activations in fewer bits (`plan.wire.activations`), and gradients of these.

    value -> to_blocks -> SENT             RECEIVED -> from_blocks -> what reads the value
    gradient -> to_blocks -> RETURNED      RETURNED -> from_blocks -> what reads the gradient

*Contract.* `compressed_messages` decides, for all stages at once, what crosses in few bits, and marks the ports of these
values (`Port.few_bits`): activations that parameters made, and gradients, that get smaller by it and go to no stage on
the same rank. On entry of the pass a stage's program has the values themselves at these ports. On exit it has their
bytes, in a format of `zgraph.program.block_quantization`. Both sides take the elements in the order of the value's
dimensions, whatever its strides; the reader gets them in the strides that it was captured with. A value is rounded once,
to the nearest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from zgraph.passes.compression.quantize_transfers import CompressOptions
from zgraph.passes.contract import graph_pass
from zgraph.passes.stages.cut_stages import StageMessage, Stages
from zgraph.program.block_quantization import FROM_BLOCKS, TO_BLOCKS, bytes_of
from zgraph.program.node import NodeInfo, Phase, info, tensor
from zgraph.program.program import Fact, InputRole, OutputRole, Port, Program
from zgraph.program.sizes import typical

aten = torch.ops.aten


def compressed_messages(stages: Stages, rank_of: Sequence[int], options: CompressOptions) -> Stages:
    """Return the stages with bytes as messages where these options send fewer bits; the ports of such values are
    marked. `rank_of` has the position along "pp" of each stage's rank.
    """
    apart: dict[tuple[str, bool], bool] = {}  # whether a value goes to other ranks alone
    for message in stages.transfers:
        key = message.name, message.back
        apart[key] = apart.get(key, True) and rank_of[message.source] != rank_of[message.target]
    messages = [_in_bytes(m, options) if m.learned and apart[m.name, m.back] else m for m in stages.transfers]
    few = {(m.name, m.back) for m, before in zip(messages, stages.transfers, strict=True) if m is not before}
    for program in stages.programs:
        program.inputs = [_marked(port, few, InputRole.RECEIVED, InputRole.RETURNED) for port in program.inputs]
        program.outputs = [_marked(port, few, OutputRole.SENT, OutputRole.RETURNED) for port in program.outputs]
    return replace(stages, transfers=tuple(messages))


def _marked(port: Port, few: set[tuple[str, bool]], ahead: object, back: object) -> Port:
    crosses = port.role in (ahead, back) and (port.name, port.role is back) in few
    return replace(port, few_bits=True) if crosses else port


def _in_bytes(message: StageMessage, options: CompressOptions) -> StageMessage:
    like, told = message.like, (options.format, options.block)
    count = typical(like.numel())
    if not like.dtype.is_floating_point or bytes_of(count, *told) >= count * like.element_size():
        return message
    with like.fake_mode:  # type: ignore[attr-defined]
        sent = torch.empty(bytes_of(like.numel(), *told), dtype=torch.uint8, device=like.device)
    return replace(message, like=sent)


@graph_pass(
    "compress_messages",
    "pipeline stages send each other activations and their gradients in fewer bits",
    options=CompressOptions,
    requires=(Fact.REDUCED,),
    provides=(Fact.COMPRESSED,),
    conflicts=(Fact.SCHEDULED,),
    bitwise=False,
)
def compress_messages(program: Program, options: CompressOptions) -> dict[str, int]:
    told = (options.format, options.block)
    incoming = [node for port, node in program.input_items() if port.few_bits]
    for node in incoming:
        _receive(program, node, told)
    outgoing = [node for port, node in program.output_items() if port.few_bits]
    saved = sum(_saved(node, options) for node in outgoing)
    items = program.output_items()
    program.set_outputs([(port, _sent(program, node, told) if port.few_bits else node) for port, node in items])
    return {"sent": len(outgoing), "received": len(incoming), "bytes_saved": saved}


def _saved(node: fx.Node, options: CompressOptions) -> int:
    count = typical(tensor(node).numel())
    return count * tensor(node).element_size() - bytes_of(count, options.format, options.block)


def _sent(program: Program, node: fx.Node, told: tuple[str, int]) -> fx.Node:
    """Return the bytes of a value, made right behind it."""
    record = NodeInfo(info(node).phase, module=info(node).module, source=info(node).source, made_by="compress_messages")
    with program.graph.inserting_after(program.behind(node)):
        return program.call(TO_BLOCKS, (node, *told, 1), record, name=f"{node.name}_sent")


def _receive(program: Program, node: fx.Node, told: tuple[str, int]) -> None:
    """Let bytes arrive at an input, and make the value of them before its first reader."""
    like, record = tensor(node), info(node).replace(made_by="compress_messages")
    with program.fake_mode:
        sent = torch.empty(bytes_of(like.numel(), *told), dtype=torch.uint8, device=like.device)
    node.meta["val"] = sent
    readers = list(node.users)
    if not readers:
        return
    with program.graph.inserting_before(_first(program, min(readers), info(node).phase)):
        back = program.call(
            FROM_BLOCKS, (node, *told, 1, list(like.shape), like.dtype), record, name=f"{node.name}_back"
        )
        back = _in_strides(program, back, like, record)
    for reader in readers:
        reader.replace_input_with(node, back)


def _first(program: Program, reader: fx.Node, phase: Phase) -> fx.Node:
    """Return the node before which a value is made for its first `reader`: in the forward, if it arrives there."""
    if phase is Phase.BACKWARD or (reader.op != "output" and info(reader).phase is Phase.FORWARD):
        return reader
    compute = (n for n in program.graph.nodes if n.op not in ("placeholder", "output"))
    return next((n for n in compute if info(n).phase is Phase.BACKWARD), program.output_node())


def _in_strides(program: Program, node: fx.Node, like: torch.Tensor, record: NodeInfo) -> fx.Node:
    """Return a contiguous value in the strides of `like`, which is dense."""
    order = sorted(range(like.dim()), key=lambda d: (-typical(like.stride()[d]), d))
    if order == sorted(order):
        return node
    kwargs: dict[str, Any] = {"memory_format": torch.contiguous_format}
    turned = program.call(aten.permute.default, (node, order), record, name=f"{node.name}_turned")
    packed = program.call(aten.clone.default, (turned,), record, name=f"{node.name}_packed", kwargs=kwargs)
    order = [order.index(d) for d in range(like.dim())]
    return program.call(aten.permute.default, (packed, order), record, name=f"{node.name}_strided")

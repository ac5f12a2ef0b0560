"""The record of one node, typed and frozen; the one module that reads or writes `node.meta` for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import fx

_KEY = "zgraph"


class Phase(StrEnum):
    """The part of a training step that a node belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Role(StrEnum):
    """What a node is for. Passes read this instead of recognising shapes of subgraphs."""

    COMPUTE = "compute"
    GATHER = "gather"  # starts a collective that makes a parameter whole
    REDUCE = "reduce"  # starts a collective that averages a gradient
    EXCHANGE = "exchange"  # starts a collective over parts of a value that ranks compute together
    WAIT = "wait"  # waits for a collective or a transfer to or from a tier
    LAYOUT = "layout"  # pads, slices or permutes around a collective
    RELEASE = "release"  # the last point at which a gathered parameter may be read
    FETCH = "fetch"  # starts copying a value from its tier to the device
    STORE = "store"  # starts copying one to its tier
    ACCUMULATE = "accumulate"  # adds a gradient to that of earlier micro-batches


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """The record of one node."""

    phase: Phase  # the part of the step that it runs in
    role: Role = Role.COMPUTE  # what it is for
    module: str = ""  # the path of the user's module, "" for the root
    source: str = ""  # the user's "file:line", "" if unknown
    param: str | None = None  # the parameter that a gather, reduction or layout node serves
    mesh_dim: str | None = None  # the mesh dimension of a collective, or the part of one
    stream: str = "compute"  # the name of the stream that it is meant for
    made_by: str = "capture"  # the pass that made it; "capture" for the user's own nodes
    copy_of: str | None = None  # the node that it repeats
    bucket: str | None = None  # starts that stand side by side with the same bucket are sent as one
    ahead: bool = False  # it runs before the forward: during the update before it, if there is one
    home: str | None = None  # the tier that the value is stored in, None for the device
    group: str | None = None  # an update's nodes with the same group are compiled as one
    chunk: str | None = (
        None  # the slice of rows that it computes; nodes of one slice are done before those of the next begin
    )
    transfer: str | None = None  # the transfer that it is part of (`zgraph.program.transfers`)

    def replace(self, **changes: Any) -> NodeInfo:
        """Return this record with some fields changed."""
        return replace(self, **changes)


def info(node: fx.Node) -> NodeInfo:
    """Return the record of a node. Raises `KeyError` with the node's name when the pass that made it gave it none."""
    try:
        return node.meta[_KEY]  # type: ignore[no-any-return]
    except KeyError:
        raise KeyError(
            f"node {node.name!r} ({node.target}) carries no NodeInfo: the pass that made it gave none"
        ) from None


def has_info(node: fx.Node) -> bool:
    return _KEY in node.meta


def set_info(node: fx.Node, record: NodeInfo) -> None:
    node.meta[_KEY] = record


def value(node: fx.Node) -> Any:
    """Return the fake value (tensor, tuple of tensors, or None) of a node."""
    return node.meta.get("val")


def sequence(node: fx.Node) -> int | None:
    """Return autograd's number of the operation that a captured node belongs to, the same for its forward and backward
    nodes."""
    return node.meta.get("seq_nr")


def tensor(node: fx.Node) -> torch.Tensor:
    """Return the fake tensor of a node that has exactly one. Raises `TypeError` for others."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        raise TypeError(f"node {node.name!r} has no single tensor value but {type(val).__name__}")
    return val


def tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    """Yield all fake tensors of a node, flat."""
    val = node.meta.get("val")
    stack = [val]
    while stack:
        item = stack.pop(0)
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (tuple, list)):
            stack = list(item) + stack


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
# (the root is a parameter of forward, or the first of its `*args`, under a decorator say)
_ROOT = re.compile(r"^L\[(?:'|\")\w+(?:'|\")\](?:\[0\])?\.?")
_INDEX = re.compile(r"\[(?:'|\")?([^\]'\"]+)(?:'|\")?\]")


def source_of(meta: dict[str, Any]) -> str:
    """Return the user's innermost "file:line" from the stack trace that dynamo recorded, or ""."""
    frames = _FRAME.findall(meta.get("stack_trace") or "")
    if not frames:
        return ""
    user = [f for f in frames if "/torch/nn/" not in f[0] and "/torch/_" not in f[0]]
    file, line, _ = (user or frames)[-1]
    return f"{file}:{line}"


def module_of(meta: dict[str, Any]) -> str:
    """Return the path of the user's module that a node comes from ("" for the root), for forward and backward nodes
    alike."""
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    raw = str(list(stack.values())[-1][0])
    path = _ROOT.sub("", raw)
    path = re.sub(r"\b_(modules|parameters|buffers)\b\.?", "", path)
    return _INDEX.sub(lambda m: "." + m.group(1), path).replace("..", ".").strip(".")


def place_of(node: fx.Node) -> str:
    """Return a node's module, parameter and line, as errors show them."""
    record = info(node)
    return f"module {record.module or '(root)'}{', parameter ' + record.param if record.param else ''} {record.source}".strip()

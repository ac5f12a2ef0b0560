"""The storages that a value depends on: its own, that of the value it views, or, inside a kernel that Inductor fuses,
what that kernel reads.

Inductor computes a pointwise value inside the kernels of its readers, anew in each, and allocates nothing for it; so
its operands have to live as long as its readers. It allocates the value where a library call reads it, where it leaves
the program or its phase, or where it has several readers and is expensive to compute (`realize_opcount_threshold`,
`realize_reads_threshold` and, on CPU, exponentials).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from zgraph.program import collectives, transfers_to_host
from zgraph.program.aliases import aliased_input
from zgraph.program.node import info
from zgraph.program.sizes import static

OPERATIONS, READS = 30, 4  # Inductor's thresholds for a value with several readers
HEAVY = {"exp", "sigmoid"}
PLACED = {"gather"}  # reads elements at indices from another tensor; fused like pointwise operators
CREATORS = {"full", "iota", "scalar_tensor", "arange", "zeros", "ones"}
REDUCTIONS = {"sum", "mean", "amax", "amin", "any", "var_mean", "var", "_softmax", "_log_softmax"}


def fusible(node: fx.Node) -> bool:
    """Return whether Inductor puts an operator into a kernel with its neighbours."""
    return pointwise(node) or _name(node) in REDUCTIONS


def pointwise(node: fx.Node) -> bool:
    """Return whether each element of the result is made of the operands' elements at the same position, or of none."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in ("aten", "prims"):
        return False
    return torch.Tag.pointwise in node.target.tags or _name(node) in CREATORS | PLACED


def sources(nodes: Sequence[fx.Node], fused: bool) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Return the storages that each node's value depends on; the node itself if it has its own. `fused` says whether
    the backend fuses.
    """
    storages: dict[fx.Node, tuple[fx.Node, ...]] = {}
    size: dict[fx.Node, tuple[int, int]] = {}  # operations and reads of a value that is computed inside a kernel
    for node in nodes:
        waits = collectives.is_wait(node) or transfers_to_host.is_wait(node)
        base = node.all_input_nodes[0] if waits else aliased_input(node)
        if base is not None:
            storages[node] = storages[base]
            size[node] = size.get(base, (0, 1))
            continue
        counts = [size.get(a, (0, 1)) for a in node.all_input_nodes]
        total = 1 + sum(n for n, _ in counts), sum(n for _, n in counts)
        if fused and _inside(node, total):
            storages[node] = tuple(dict.fromkeys(s for a in node.all_input_nodes for s in storages[a]))
            size[node] = total
        else:
            storages[node] = (node,)
    return storages


def positions(nodes: Sequence[fx.Node], on: dict[fx.Node, tuple[fx.Node, ...]], fused: bool) -> dict[fx.Node, int]:
    """Return the position at which each node runs.

    Inductor puts a kernel's work into an earlier kernel of the same size that reads the same value, if all else that it
    needs is computed by then; recomputed nodes only if no library call is between the two
    (`inductor_code.order_keeper`).
    """
    position = {node: i for i, node in enumerate(nodes)}
    if not fused:
        return position
    kernels: dict[fx.Node, list[fx.Node]] = {}  # the kernels that read each storage, in order
    call = 0  # the position of the last operator that is a library call
    for node in nodes:
        if on[node] != (node,) or node.op != "call_function" or node.target is operator.getitem:
            continue
        if not fusible(node):
            call = position[node]
            continue
        read = dict.fromkeys(s for a in node.all_input_nodes for s in on[a])
        ready = max((position[s] for s in read), default=0)
        if info(node).copy_of is not None:
            ready = max(ready, call)
        large = [s for s in read if _elements(s) == _elements(node)]
        earlier = (k for s in large for k in kernels.get(s, ()) if position[k] > ready and together(k, node))
        first = next((k for k in earlier if _elements(k) == _elements(node)), None)
        if first is not None:
            position[node] = position[first]
        for s in large:
            kernels.setdefault(s, []).append(node)
    return position


def _elements(node: fx.Node) -> Any:
    val = node.meta.get("val")
    return static(val.numel()) if isinstance(val, torch.Tensor) else -1


def readers(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that read a node's memory, also through views."""
    nodes: dict[fx.Node, None] = {}
    stack = list(node.users)
    while stack:
        user = stack.pop()
        if aliased_input(user) is not None:
            stack.extend(user.users)
        else:
            nodes[user] = None
    return list(nodes)


def together(a: fx.Node, b: fx.Node) -> bool:
    """Return whether two nodes can be fused into one kernel."""
    return fusible(a) and fusible(b) and info(a).phase is info(b).phase


def _inside(node: fx.Node, total: tuple[int, int]) -> bool:
    if node.op != "call_function" or node.target is operator.getitem or not pointwise(node):
        return False
    all_readers = readers(node)
    if not all_readers or not all(together(node, reader) for reader in all_readers):
        return False
    heavy = _name(node) in HEAVY or total[0] > OPERATIONS or total[1] > READS
    return len(all_readers) == 1 or not heavy


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else ""

"""Values that are looked up once and read in many places are stored, on CPU, not looked up in each.

Inductor computes a cheap value inside of each kernel that reads it. Elements that are looked up in a table (a bias of
relative positions, which the attention of every layer adds) count as cheap, but are read one by one there, where a
stored value is read in vectors: the softmax of a T5's scores (4 rows, 8 heads, 128 x 128, one core of an EPYC) takes
3.2 ms with lookups, 0.75 without. On CUDA a table is read from its cache faster than a value as large as the scores from
memory.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from zgraph.passes.analysis.fusion import fusible, pointwise, readers
from zgraph.program import collectives, transfers_to_host
from zgraph.program.aliases import is_view
from zgraph.program.node import value
from zgraph.program.program import Program
from zgraph.torch_compat.fx_graphs import fix_strides

# A value that is read between so many pairs of library calls, or fewer, is left to Inductor: an embedding of words is
# read by the first layer's norm, and by the sum behind its attention.
FEW = 2

aten = torch.ops.aten
_LOOKUPS = {
    aten.embedding.default,
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten._unsafe_masked_index.default,
    aten.index_select.default,
    aten.gather.default,
}


def store_shared_lookups(program: Program) -> None:
    """Make Inductor store each value on a CPU that is computed from looked-up elements and is read by more than `FEW`
    kernels that can't be one, since library calls are between them."""
    calls, at = 0, {}  # how many library calls there are before each node
    for node in program.graph.nodes:
        at[node] = calls
        calls += _is_library_call(node)
    looked: set[fx.Node] = set()  # values that kernels would look up
    for node in program.graph.nodes:
        inside = pointwise(node) or is_view(node) or node.target is aten.clone.default
        if not _looks_up(node) and not (inside and not looked.isdisjoint(node.all_input_nodes)):
            continue
        if not is_view(node) and not _is_mask(node) and len({at[reader] for reader in readers(node)}) > FEW:
            fix_strides(node)
        else:
            looked.add(node)


def _is_library_call(node: fx.Node) -> bool:
    """Return whether kernels on the two sides of this node can't be one. (Transfers compute nothing: what runs on both
    sides of one may be one kernel.)"""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    transfer = collectives.is_start(node) or collectives.is_wait(node) or transfers_to_host.is_host_transfer(node)
    return not (transfer or fusible(node) or is_view(node) or _looks_up(node))


def _is_mask(node: fx.Node) -> bool:
    """Return whether this is a mask: its bytes are widened by each kernel that reads them, which takes longer than to
    compare two looked-up numbers once more."""
    val = value(node)
    return isinstance(val, torch.Tensor) and val.dtype is torch.bool


def _looks_up(node: fx.Node) -> bool:
    val = value(node)
    return node.target in _LOOKUPS and isinstance(val, torch.Tensor) and val.device.type == "cpu"

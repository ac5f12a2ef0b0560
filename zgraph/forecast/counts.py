"""Counts of one program for a forecast, before seconds are computed: operators, transfers, saved values.

Bytes of what the model computes depend on the batch and the sequence; bytes of shards, of gathered weights and of
padded gradients depend on the number of ranks that share the parameter. The two are told apart here, at a number of
ranks that divides no parameter's rows: then a shard, the whole parameter and the padded parameter all differ in their
number of rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zgraph.passes.analysis.costs import Costs, bytes_of, flops_of, size_of
from zgraph.passes.analysis.live_memory import memory_of
from zgraph.passes.analysis.simulator import bucket_of
from zgraph.program import collectives
from zgraph.program.aliases import is_view, root_of
from zgraph.program.node import Role, info, tensors
from zgraph.program.program import ParamSpec, Program

_PAD = torch.ops.aten.constant_pad_nd.default


@dataclass(frozen=True)
class Bytes:
    """A number of bytes that may depend on the number of ranks: `fixed`, and those of rows of parameters.

    Of n rows each rank has ceil(n / ranks), padded; all ranks together have ranks * ceil(n / ranks).
    """

    fixed: int = 0  # bytes that do not depend on the number of ranks
    # (a parameter's rows, whether those of all ranks, bytes of one row), any number of them
    rows: tuple[tuple[int, bool, int], ...] = ()

    @classmethod
    def sum(cls, parts: Iterable[Bytes]) -> Bytes:
        fixed, rows = 0, Counter[tuple[int, bool]]()
        for part in parts:
            fixed += part.fixed
            for n, whole, size in part.rows:
                rows[n, whole] += size
        return cls(fixed, tuple(sorted((n, whole, size) for (n, whole), size in rows.items())))

    @classmethod
    def of_shard(cls, shape: tuple[int, ...], itemsize: int, spec: ParamSpec) -> Bytes:
        """Return the bytes of a tensor that has this shape on the rank that holds `spec`'s shard."""
        size = itemsize * torch.Size(shape).numel()
        if spec.shard_dim is None or not shape or shape[0] != spec.rows:
            return cls(size)
        return cls(0, ((spec.shape[0], False, size // spec.rows),))

    def at(self, ranks: int) -> int:
        return self.fixed + sum(-(-n // ranks) * (ranks if whole else 1) * size for n, whole, size in self.rows)

    def formula(self, ranks: Any, fixed: Any = None) -> Any:
        """Return the bytes as a sympy expression in `ranks`, with `fixed` in place of the fixed bytes if it is
        given."""
        import sympy

        rows = (sympy.ceiling(n / ranks) * (ranks if whole else 1) * size for n, whole, size in self.rows)
        return sympy.Add(self.fixed if fixed is None else fixed, *rows)


@dataclass(frozen=True)
class Operator:
    """An operator that takes time."""

    node: str  # its node's name
    target: str  # what it calls
    flops: int  # its floating-point operations
    moved: Bytes  # the bytes that it reads and writes
    rate: float  # the floating-point operations in a second of its dtype
    # the rows that it pads to a multiple of the ranks (it exists only where they are none); None for any other
    padding: int | None


@dataclass(frozen=True)
class Run:
    """Transfers of one kind over one mesh dimension, in order, that may share buckets."""

    dim: str  # the mesh dimension
    kind: str  # the collective
    sizes: tuple[Bytes, ...]  # the bytes of each transfer


@dataclass(frozen=True)
class Node:
    """The facts of a node that must be equal for two programs to have the same operators. Views are no nodes here: they
    take no time, and a slice is left out at the size at which it is all of its input."""

    name: str  # its name, for errors
    target: str  # what it calls
    phase: str  # its phase; "" for the output
    inputs: tuple[int, ...]  # the positions of the nodes that it reads

    def like(self, other: Node) -> bool:
        return (self.target, self.phase, self.inputs) == (other.target, other.phase, other.inputs)


@dataclass(frozen=True)
class Counts:
    """The counts of one program."""

    nodes: tuple[Node, ...]  # all nodes but views, in order
    operators: tuple[Operator, ...]  # what takes time on the device
    runs: tuple[Run, ...]  # what takes time on links
    activations: int  # bytes saved from the forward for the backward, at their peak


def count(program: Program, costs: Costs, shared: int | None) -> Counts:
    """Count in a program whose buckets are runs. `shared` is the number of ranks over which "dp" shards, or None if it
    is the same at every size: then no bytes depend on it."""
    order = {n: at for at, n in enumerate(n for n in program.graph.nodes if not is_view(n))}
    nodes = tuple(
        Node(
            n.name,
            _target(n),
            str(info(n).phase) if n.op != "output" else "",
            tuple(dict.fromkeys(order[root_of(a)] for a in n.all_input_nodes)),
        )
        for n in order
    )

    def size(node: fx.Node) -> Bytes:
        return _size(node, program, shared)

    operators = tuple(
        Operator(
            n.name,
            _target(n),
            flops_of(n),
            Bytes.sum(size(m) for m in costs.moved(n)),
            costs.rate(n),
            _padded_rows(n, program) if shared is not None else None,
        )
        for n in costs.compute(program)
    )
    runs: list[Run] = []
    seen: set[fx.Node] = set()
    for node in order:
        if collectives.is_start(node) and node not in seen:
            starts = bucket_of(node)
            seen.update(starts)
            sizes = tuple(size(s) if size_of(s) == bytes_of(s) else size(s.all_input_nodes[0]) for s in starts)
            runs.append(Run(collectives.group_of(node), collectives.kind(node), sizes))
    activations = max((m.get("activations", 0) for m in memory_of(program)), default=0)
    return Counts(nodes, operators, tuple(runs), activations)


def _target(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_function" else node.op


def _size(node: fx.Node, program: Program, shared: int | None) -> Bytes:
    spec = program.params.get(str(info(node).param))
    outputs = list(tensors(node))
    if shared is None or spec is None or spec.shard_dim is None or len(outputs) != 1 or not outputs[0].dim():
        return Bytes(size_of(node))
    rows = outputs[0].shape[0]
    if rows == spec.rows:
        return Bytes(0, ((spec.shape[0], False, size_of(node) // rows),))
    if rows == spec.rows * shared:
        return Bytes(0, ((spec.shape[0], True, size_of(node) // rows),))
    return Bytes(size_of(node))


def _padded_rows(node: fx.Node, program: Program) -> int | None:
    record = info(node)
    if node.target is not _PAD or record.role is not Role.LAYOUT or record.param is None:
        return None
    return program.params[record.param].shape[0]

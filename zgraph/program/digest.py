"""What of a program must be equal on all ranks, as hashes: of each node, and of the whole.

Files, lines and module names are left out: they may differ between machines and change nothing.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import fx

from zgraph.program import collectives
from zgraph.program.node import value
from zgraph.program.program import Program


def node_digests(program: Program) -> list[tuple[str, str]]:
    """(name, hash of the operator, its arguments and the type of its value) of each node, in order."""
    return [(node.name, _hash(_describe(node))) for node in program.graph.nodes]


def digest(program: Program) -> str:
    """One hash of everything that all ranks must have equal: nodes in order, roles of inputs and outputs, mesh."""
    ports = [f"{p.role}:{p.name}:{p.index}" for p in (*program.inputs, *program.outputs)]
    return _hash(f"{node_digests(program)} {ports} {program.mesh}")


def collective_order(program: Program) -> list[str]:
    """The starts and waits of collectives in order, one readable line each."""
    return [_describe(n) for n in program.graph.nodes if collectives.is_start(n) or collectives.is_wait(n)]


def first_difference(mine: list[tuple[str, str]], theirs: list[tuple[str, str]]) -> str | None:
    """The name of the first node in which two programs' `node_digests` differ, None if in none."""
    for a, b in zip(mine, theirs, strict=False):
        if a != b:
            return b[0] if a[0] == b[0] else f"{b[0]} (here {a[0]})"
    if len(mine) != len(theirs):
        return max(mine, theirs, key=len)[min(len(mine), len(theirs))][0]
    return None


def _describe(node: fx.Node) -> str:
    args = fx.node.map_arg(node.args, lambda n: n)
    return f"{node.op} {node.name} {node.target} {args} {dict(node.kwargs)} -> {_type(value(node))}"


def _type(val: Any) -> str:
    if isinstance(val, torch.Tensor):
        return f"{val.dtype}{list(val.shape)}{list(val.stride())}"
    if isinstance(val, (tuple, list)):
        return f"({', '.join(_type(v) for v in val)})"
    return type(val).__name__


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

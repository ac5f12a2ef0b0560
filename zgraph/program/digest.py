"""Hashes of what must be equal on all ranks: of each node of a program, and of the whole.

They leave out what may differ between ranks that run the same program: files, lines and module names, which differ
between machines; the number of a device ("cuda:1"), since each rank has its own; addresses of Python objects.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import fx

from zgraph.program import collectives
from zgraph.program.lazy_program import LazyProgram
from zgraph.program.node import has_info, info, value
from zgraph.program.program import Level, Program


def node_digests(program: Program) -> list[tuple[str, str]]:
    """Return (name, hash of the operator, its arguments and the type of its value) of each node, in order."""
    return [(node.name, _hash(_describe(node))) for node in program.graph.nodes]


def digest(program: Program) -> str:
    """Return one SHA-256, in hex, of all that ranks must have equal: nodes in order, roles of inputs and outputs,
    mesh, level."""
    if isinstance(program, LazyProgram) and not program.is_made:
        return program.kept_digest
    ports = [f"{p.role}:{p.name}:{p.index}:{p.of}" for p in (*program.inputs, *program.outputs)]
    return _hash(f"{node_digests(program)} {ports} {list(program.mesh.items())} {Level(program.level).name}")


def collective_order(program: Program) -> list[str]:
    """Return the starts and waits of collectives in order, as one readable line each."""
    return [_describe(n) for n in program.graph.nodes if collectives.is_start(n) or collectives.is_wait(n)]


def first_difference(mine: list[tuple[str, str]], theirs: list[tuple[str, str]]) -> str | None:
    """Return the name of the first node in which two programs' `node_digests` differ, or None if they are equal."""
    for a, b in zip(mine, theirs, strict=False):
        if a != b:
            return b[0] if a[0] == b[0] else f"{b[0]} (here {a[0]})"
    if len(mine) != len(theirs):
        return max(mine, theirs, key=len)[min(len(mine), len(theirs))][0]
    return None


def _describe(node: fx.Node) -> str:
    bucket = f" in {info(node).bucket}" if has_info(node) and info(node).bucket else ""
    return f"{node.name} = {_target(node)}{_text(node.args)} {_text(dict(node.kwargs))} -> {_type(value(node))}{bucket}"


def _target(node: fx.Node) -> str:
    """Return the operator by its name; with the kind of node where the target is only a name ("placeholder x")."""
    target = node.target
    if isinstance(target, str):
        return f"{node.op} {target}"
    if isinstance(target, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        return str(target)
    return f"{getattr(target, '__module__', None)}.{getattr(target, '__qualname__', type(target).__name__)}"


def _text(arg: Any) -> str:
    """Return an argument as text that is the same on every rank."""
    if isinstance(arg, fx.Node):
        return arg.name
    if isinstance(arg, torch.device):
        return f"device({arg.type})"
    if isinstance(arg, tuple):
        return f"({', '.join(map(_text, arg))})"
    if isinstance(arg, list):
        return f"[{', '.join(map(_text, arg))}]"
    if isinstance(arg, dict):
        return f"{{{', '.join(f'{key}={_text(item)}' for key, item in arg.items())}}}"
    if isinstance(arg, slice):
        return f"slice{_text((arg.start, arg.stop, arg.step))}"
    return repr(arg)


def _type(val: Any) -> str:
    if isinstance(val, torch.Tensor):
        return f"{val.dtype}{list(val.shape)}{list(val.stride())} {val.device.type}"
    if isinstance(val, (tuple, list)):
        return f"({', '.join(_type(v) for v in val)})"
    return type(val).__name__


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

"""A program as a Python file that runs: imports, a `forward` over a module of its constants, and inputs of the right
types.

Besides the program's code the file has what Python needs to run it: the objects that the code refers to by name,
constants and inputs.
"""

from __future__ import annotations

import operator
from types import ModuleType
from typing import Any

import torch
from torch import fx

from zgraph.errors import UnsupportedError
from zgraph.program import collectives, transfers_to_host
from zgraph.program.node import value
from zgraph.program.program import Program
from zgraph.program.sizes import is_symbolic, text

_HEAD = '''"""Program {name} of zgraph: {nodes} nodes, mesh {mesh}.

`inputs()` makes random inputs of the right types, `forward` runs the program on them.{note}
"""

import torch
from torch import device, inf, nan

import zgraph.program.collectives
import zgraph.program.transfers_to_host
import zgraph.program.ops
'''
_NEEDS_RANKS = """
Its collectives need the process groups that they name: on one process they can be read, and not run."""


def python_source(program: Program) -> str:
    """Return the file's text. Raises `UnsupportedError` for a constant that is too large to be written down."""
    code = program.graph.python_code("self")
    ranks = any(collectives.is_start(n) or transfers_to_host.is_host_transfer(n) for n in program.graph.nodes)
    note = _NEEDS_RANKS if ranks else ""
    head = _HEAD.format(name=program.name, nodes=len(program.graph.nodes), mesh=program.mesh or "none", note=note)
    globals_ = [
        f"{name} = {_path(constant)}"
        for name, constant in code.globals.items()
        if name not in ("torch", "device", "inf", "nan")
    ]
    parts = [head, *globals_, _constants(program), code.src.strip(), _inputs(program)]
    parts += ["" if ranks else 'if __name__ == "__main__":\n    print(forward(constants(), *inputs()))']
    return "\n\n".join(part for part in parts if part) + "\n"


def _path(held: Any) -> str:
    if held is type(None):
        return "type(None)"
    if isinstance(held, ModuleType):
        return f"__import__({held.__name__!r}, fromlist=['_'])"
    module, name = getattr(held, "__module__", None), getattr(held, "__qualname__", None)
    if isinstance(held, (torch.dtype, torch.memory_format, torch.layout, torch.device)):
        return repr(held) if not isinstance(held, torch.device) else f"torch.{held!r}"
    if module in ("builtins", None) or name is None:
        return name or repr(held)
    return f"__import__({module!r}, fromlist=['_']).{name}"


def _constants(program: Program) -> str:
    """Return the source of a function that makes an object with the program's constants."""
    lines = ["def constants():", "    held = torch.nn.Module()"]
    for node in program.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        tensor = operator.attrgetter(name)(program.module)
        if tensor.numel() > 10_000:
            raise UnsupportedError(
                f"constant {name!r} is too large to be written as Python",
                where=f"node {node.name!r}",
                hint="--format json",
            )
        source = f"torch.tensor({tensor.tolist()!r}, dtype={tensor.dtype}, device={str(tensor.device)!r})"
        lines.append(f"    held.{name} = {source}")
    return "\n".join([*lines, "    return held"])


def _inputs(program: Program) -> str:
    given = ", ".join(f"{s.name}={s.typical}" for s in program.sizes.symbols)
    lines = [f"def inputs({given}):", "    return ["]
    for port, node in program.input_items():
        lines.append(f"        {_random(node)},  # {node.name}: {port.role} {port.name}")
    return "\n".join([*lines, "    ]"])


def _random(node: fx.Node) -> str:
    example = value(node)
    if is_symbolic(example):
        return text(example)
    if not isinstance(example, torch.Tensor):
        return repr(example)
    where = f"dtype={example.dtype}, device={str(example.device)!r}"
    shape, strides = ("".join(f"{text(n)}, " for n in numbers) for numbers in (example.shape, example.stride()))
    strided = f"torch.empty_strided(({shape}), ({strides}), {where})"
    return f"{strided}.normal_()" if example.dtype.is_floating_point else f"{strided}.zero_()"

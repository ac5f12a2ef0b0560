"""`backend="eager"`: the program operator by operator, as PyTorch itself would run it."""

from __future__ import annotations

from zgraph.codegen.executable import Executable, lowered
from zgraph.program import torch_private
from zgraph.program.program import Program


def compile_eager(program: Program, groups: dict[str, str]) -> Executable:
    """Make a callable of `program`; `groups` gives each mesh dimension's process group by name."""
    ready = lowered(program, groups)
    torch_private.boxed(ready.graph)
    ready.module.recompile()
    return Executable(program, ready.module.forward, ready.module.code)

"""`backend="eager"`: the program operator by operator, as PyTorch itself would run it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zgraph.codegen.executable import Executable, lowered
from zgraph.codegen.profiled import run_profiled
from zgraph.program import torch_private
from zgraph.program.program import Program

aten = torch.ops.aten


def compile_eager(program: Program, groups: dict[str, str]) -> Executable:
    """Make a callable of `program`; `groups` gives each mesh dimension's process group by name.

    A view of a value becomes a reshape: some operators' fake implementations promise strides that the real
    ones don't give (batch_norm of a transposed input), so that what was captured as a view may need a copy.
    """
    ready = lowered(program, groups)
    for node in ready.graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default
    torch_private.boxed(ready.graph)
    ready.module.recompile()
    source = ready.module.code  # (written here: `forward` is that of this code from now on)
    forward = ready.module.forward

    def run(values: list[Any]) -> Sequence[Any]:
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            return run_profiled(ready.module, values)
        return forward(values)  # type: ignore[no-any-return]

    return Executable(program, run, source)

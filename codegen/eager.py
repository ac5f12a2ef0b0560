"""`backend="eager"`: the program operator by operator, as PyTorch itself would run it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
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
    forward: Any = ready.module.forward

    def run(values: list[Any]) -> Sequence[Any]:
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            return run_profiled(ready.module, values)
        return forward(values)  # type: ignore[no-any-return]

    def rebuild(changed: str, names: dict[str, Any]) -> Callable[[list[Any]], Sequence[Any]]:
        scope = {**forward.__func__.__globals__, **names}
        exec(compile(changed, f"<{program.name}>", "exec"), scope)
        return functools.partial(scope["forward"], ready.module)

    return Executable(program, run, source, calls=_calls(source, program), rebuild=rebuild)


_CALL = re.compile(r"    (\w+)(?: : [^=]+)? = ")


def _calls(source: str, program: Program) -> tuple[tuple[int, int], ...]:
    """The line and the position of each operator."""
    at = {n.name: i for i, n in enumerate(program.graph.nodes) if n.op == "call_function"}
    found = [(line, _CALL.match(text)) for line, text in enumerate(source.splitlines())]
    return tuple((line, at[match[1]]) for line, match in found if match and match[1] in at)

"""`backend="inductor"`: Inductor makes fused kernels of a program, in the order that passes decided.

Both of Inductor's reorder passes are off: they move the start of a collective next to its wait. The strides that
Inductor chose for the forward's saved values are those that the backward is compiled for.
"""

from __future__ import annotations

import re
from typing import Any

import torch._inductor.config as inductor_config

from zgraph.codegen.executable import Executable, Kernel, lowered
from zgraph.errors import LoweringError
from zgraph.program import torch_private
from zgraph.program.node import info
from zgraph.program.program import InputRole, OutputRole, Program

KEEP_ORDER: dict[str, Any] = {"reorder_for_locality": False, "reorder_for_peak_memory": False}


def compile_inductor(program: Program, groups: dict[str, str], *, is_backward: bool = False, fix_saved: bool = False) -> Executable:
    """Compile `program`; `groups` gives each mesh dimension's process group by name.

    With `fix_saved` saved values keep the strides that they have in the program; else Inductor chooses. Raises `LoweringError` with the operator and the user's line if Inductor can't lower it: nothing falls back.
    """
    ready = lowered(program, groups)
    inputs = [node.meta["val"] for node in ready.placeholders()]
    fixed = [i for i, port in enumerate(program.outputs) if fix_saved or port.role is not OutputRole.SAVED]
    ready.output_node().meta["user_visible_output_idxs"] = fixed
    try:
        with inductor_config.patch(KEEP_ORDER):
            function, source, strides = torch_private.compile_with_inductor(ready.module, inputs, ready.fake_mode, is_backward)
    except Exception as error:
        raise _lowering_error(error, program) from error
    return Executable(program, function, source, kernels(source, program), strides)


def adopt_strides(backward: Program, forward: Executable) -> None:
    """Let the backward's saved inputs have the strides that the forward really gives."""
    if not forward.strides:
        return
    chosen = {
        port.name: strides
        for port, strides in zip(forward.program.outputs, forward.strides, strict=True)
        if port.role is OutputRole.SAVED and strides is not None
    }
    for port, node in backward.input_items():
        if port.role is InputRole.SAVED and port.name in chosen:
            val = node.meta["val"]
            strides = tuple(int(s) for s in chosen[port.name])
            if strides != val.stride():
                with backward.fake_mode:
                    node.meta["val"] = val.as_strided(val.size(), strides)


_DEFINITION = re.compile(r"^(?P<name>(?:cpp|triton)\w*?_fused_(?P<operators>\w*?)_?\d+) = async_compile\.", re.M)


def kernels(source: str, program: Program) -> tuple[Kernel, ...]:
    """The fused kernels of Inductor's generated code, each with the operators that it computes.

    A kernel's name is the sorted operators joined by underscores; they are told apart by the program's own operators.
    """
    known = {_base(str(n.target)) for n in program.graph.nodes} | {_base(str(n.meta.get("original_aten", ""))) for n in program.graph.nodes}
    return tuple(Kernel(m["name"], _operators(m["operators"], known)) for m in _DEFINITION.finditer(source))


def _base(target: str) -> str:
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target


def _operators(text: str, known: set[str]) -> tuple[str, ...]:
    """"add__to_copy" -> ("add", "_to_copy"): the first split, longest names first, that uses up the text."""
    if not text:
        return ()
    for end in sorted((i for i in range(1, len(text) + 1) if text[:i] in known and (i == len(text) or text[i] == "_")), reverse=True):
        rest = _operators(text[end + 1 :], known)
        if rest or end == len(text):
            return (text[:end], *rest)
    return ()


def _lowering_error(error: Exception, program: Program) -> LoweringError:
    text = str(error)
    target = re.search(r"target: (\S+)", text)
    name = target.group(1) if target else None
    node = next((n for n in program.graph.nodes if name and str(n.target) == name), None)
    return LoweringError(
        f"Inductor can't compile {program.name}" + (f": operator {name}" if name else ""),
        where=(f"{info(node).source or 'unknown line'} (module {info(node).module or 'root'})" if node is not None else None),
        why=f"{type(error).__name__}: {text.splitlines()[0] if text else ''}",
        hint='use backend="eager" for this model, or write this part with other operators',
    )



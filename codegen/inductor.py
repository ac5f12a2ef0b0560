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


def compile_inductor(program: Program, groups: dict[str, str], *, is_backward: bool = False) -> Executable:
    """Compile `program`; `groups` gives each mesh dimension's process group by name.

    Raises `LoweringError` with the operator and the user's line if Inductor can't lower it: nothing falls back.
    """
    ready = lowered(program, groups)
    inputs = [node.meta["val"] for node in ready.placeholders()]
    fixed = [i for i, port in enumerate(program.outputs) if port.role is not OutputRole.SAVED]
    ready.output_node().meta["user_visible_output_idxs"] = fixed
    try:
        with inductor_config.patch(KEEP_ORDER):
            function, source, strides = torch_private.compile_with_inductor(ready.module, inputs, ready.fake_mode, is_backward)
    except Exception as error:
        raise _lowering_error(error, program) from error
    return Executable(program, function, source, kernels(source), strides)


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


_DEFINITION = re.compile(r"^(\w+) = async_compile\.(?:cpp_pybinding|cpp|triton)\(", re.M)
_NODES = re.compile(r"# Topologically Sorted Source Nodes: \[([^\]]*)\], Original ATen: \[([^\]]*)\]")


def kernels(source: str) -> tuple[Kernel, ...]:
    """The fused kernels of Inductor's generated code, each with the operators that it computes."""
    found: list[Kernel] = []
    names = set(_DEFINITION.findall(source))
    seen: set[str] = set()
    comment: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    for line in source.splitlines():
        text = line.strip()
        if match := _NODES.match(text):
            comment = (_split(match.group(2)), _split(match.group(1)))
            continue
        name = re.match(r"(\w+)(?:\.run)?(?: = async_compile|\()", text)
        if name and name.group(1) in names and name.group(1) not in seen and comment[0]:
            seen.add(name.group(1))
            found.append(Kernel(name.group(1), *comment))
    return tuple(found)


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


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



"""Rules about symbolic sizes: one input for each, no size is handed on, and no pass asks anything of them."""

from __future__ import annotations

import torch

from zgraph.passes.verifier.faults import Faults, fault
from zgraph.program.node import value
from zgraph.program.program import InputRole, OutputRole, Program
from zgraph.program.sizes import asked_since, is_symbolic, static


def check_sizes(program: Program) -> Faults:
    """Check that each symbolic size is one input, that all other numbers are arithmetic on these, and that no output is
    a number.
    """
    known = {s.name for s in program.sizes.symbols}
    given = {port.name: node for port, node in program.input_items() if port.role is InputRole.SIZE}
    if given.keys() != known:
        why = f"its sizes are {sorted(known)}, its inputs {sorted(given)}"
        yield fault(program, None, "sizes and the inputs for them differ", why)
    for node in given.values():
        if not isinstance(value(node), torch.SymInt) or not getattr(static(value(node)), "is_Symbol", False):
            yield fault(program, node, f"size {node.name!r} is no symbol", f"it is {static(value(node))}")
    for port, node in program.output_items():
        if is_symbolic(value(node)):
            what = f"{port.role} {port.name!r} is a number made of sizes"
            why = (
                "the backward gets the sizes and makes it again"
                if port.role is OutputRole.SAVED
                else "programs give tensors"
            )
            yield fault(program, node, what, why)


def check_guards(program: Program) -> Faults:
    """Check that no pass has asked anything of the symbolic sizes since the capture: the program would hold for fewer
    sizes than it says.
    """
    for guard in asked_since(program):
        yield fault(
            program,
            None,
            f"a pass asked whether {guard.condition}",
            "for sizes for which that is otherwise the program would be wrong; compare `static` sizes, decide by `typical` ones",
        )

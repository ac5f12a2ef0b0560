"""A backward that adds each gradient in place to a running sum (an input) as soon as the gradient is computed.

The memory of a gradient is free for the next one, and the gradient is added while it is still in the processor's
caches; a backward that returns all its gradients holds them beside the sums. The additions are the same, in the same
order.
"""

from __future__ import annotations

import re

import torch

from zgraph.program.node import Role, info
from zgraph.program.program import InputRole, OutputRole, Port, Program


def summing(part: Program) -> Program:
    """Return a copy of an executable backward (or of its part that computes gradients) that accumulates into sums.

    Each gradient gets an input, a sum in memory of its own with the gradient's strides (without its gaps), and is no
    output any more. A gradient that is offloaded stays an output: it has arrived in its tier only when the program is
    over.
    """
    program = part.snapshot()
    program.name = f"{part.name}.summing"
    outputs = []
    for port, node in program.output_items():
        if port.role is not OutputRole.GRADIENT or info(node).home is not None:
            outputs.append((port, node))
            continue
        with program.fake_mode:
            fake = torch.empty_like(node.meta["val"])
        record = info(node).replace(role=Role.ACCUMULATE, param=port.name, made_by="summing")
        name = "sum_" + re.sub(r"\W+", "_", port.name)
        accumulator = program.add_input(Port(InputRole.ACCUMULATOR, port.name), fake, record, name=name)
        with program.graph.inserting_after(program.behind(node)):
            program.call(torch.ops.aten.add_.Tensor, (accumulator, node), record, name=f"add_to_{accumulator.name}")
    program.set_outputs(outputs)
    program.recompile()
    return program

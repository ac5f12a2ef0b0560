"""A backward that adds its gradients to sums that come in, in place, each as soon as it is there.

What a gradient lay in is free for the next one, and it is added while it is still in the processor's caches: a backward that gives all its
gradients holds them beside the sums. The additions are the same, in the same order.
"""

from __future__ import annotations

import re

import torch

from zgraph.program.node import Role, info
from zgraph.program.program import InputRole, OutputRole, Port, Program


def summing(part: Program) -> Program:
    """A copy of an executable backward, or of its part that makes gradients. A sum lies as its gradient does, or one with gaps as a copy of
    it, and in memory of its own. A gradient that leaves for a home elsewhere is given as it was: it is there when the program is over."""
    made = part.snapshot()
    made.name = f"{part.name}.summing"
    left = []
    for port, node in made.output_items():
        if port.role is not OutputRole.GRADIENT or info(node).home is not None:
            left.append((port, node))
            continue
        with made.fake_mode:
            fake = torch.empty_like(node.meta["val"])
        record = info(node).replace(role=Role.ACCUMULATE, param=port.name, made_by="summing")
        name = "sum_" + re.sub(r"\W+", "_", port.name)
        held = made.add_input(Port(InputRole.ACCUMULATOR, port.name), fake, record, name=name)
        with made.graph.inserting_after(made.behind(node)):
            made.call(torch.ops.aten.add_.Tensor, (held, node), record, name=f"add_to_{held.name}")
    made.set_outputs(left)
    made.recompile()
    return made

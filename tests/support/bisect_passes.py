"""Two passes of which the second undoes what the first does."""

from __future__ import annotations

import torch

from zgraph.passes import graph_pass
from zgraph.program.node import info
from zgraph.program.program import OutputRole, Program


def _negate(program: Program) -> None:
    items = []
    for port, node in program.output_items():
        if port.role is OutputRole.MUTATION:
            with program.graph.inserting_before(program.output_node()):
                node = program.call(torch.ops.aten.neg.default, (node,), info(node), name="negated")
        items.append((port, node))
    program.set_outputs(items)


negate = graph_pass("negate", "negates what buffers become", bitwise=False)(_negate)
negate_again = graph_pass("negate_again", "negates it once more", bitwise=False)(_negate)

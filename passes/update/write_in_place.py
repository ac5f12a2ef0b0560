"""An update's results are written over the inputs that they replace, each as soon as nothing reads the old value.

*Contract.* On entry new weights and states are outputs of a pure program. On exit they are `copy_` nodes and no longer
outputs: one parameter's update needs memory for nothing but itself, and Inductor writes from the kernel that computes.
Safe because a write comes after the last reader of the old value, and of every view of it.
"""

from __future__ import annotations

import torch
from torch import fx

from zgraph.passes.contract import graph_pass
from zgraph.program.aliases import aliases_of
from zgraph.program.node import NodeInfo, Phase, info
from zgraph.program.program import Fact, OutputRole, Port, Program


@graph_pass(
    "write_in_place",
    "new weights and states are written over the old ones",
    provides=(Fact.IN_PLACE,),
    conflicts=(Fact.IN_PLACE,),
)
def write_in_place(program: Program) -> dict[str, int]:
    places = {(port.role, port.name): node for port, node in program.input_items()}
    left: list[tuple[Port, fx.Node]] = []
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    output = program.output_node()
    written = 0
    for port, node in list(program.output_items()):
        if port.role is not OutputRole.MUTATION or port.of is None:
            left.append((port, node))
            continue
        place = places[port.of, port.name]
        readers = [u for alias in aliases_of(place) for u in alias.users if u is not output]
        last = max([node, *readers], key=order.__getitem__)
        record = NodeInfo(Phase.UPDATE, param=info(place).param, made_by="write_in_place")
        with program.graph.inserting_after(program.behind(last)):
            program.call(torch.ops.aten.copy_.default, (place, node), record, name=f"write_{place.name}")
        written += 1
    program.set_outputs(left)
    return {"written": written}

"""Half precision: the backward starts from scaled tangents, so that small gradients are not rounded to zero.

The backward is linear in its tangents, so all gradients are scaled alike; `reduce_gradients`, which comes later, divides
them again once they are in the dtype that they are kept in (Micikevicius et al., 2018, "Mixed Precision Training").
"""

from __future__ import annotations

import torch

from zgraph.passes.contract import graph_pass
from zgraph.program.node import NodeInfo, Phase, Role, info, tensor
from zgraph.program.program import Fact, InputRole, OutputRole, Port, Program

aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default


@graph_pass(
    "scale_loss",
    "the backward starts from tangents that are multiplied by the loss scale",
    provides=(Fact.SCALED,),
    conflicts=(Fact.SCALED, Fact.REDUCED),
    bitwise=False,
)
def scale_loss(program: Program) -> dict[str, int]:
    tangents = [node for port, node in program.input_items() if port.role is InputRole.TANGENT and node.users]
    # (the gradients that a later pipeline stage returns are scaled already)
    begins = [*tangents, *program.input_nodes(InputRole.RETURNED).values()]
    if not begins:
        return {"scaled": 0}
    with program.fake_mode:
        fake = torch.empty((), dtype=torch.float32, device=tensor(begins[0]).device)
    record = NodeInfo(Phase.BACKWARD, Role.COMPUTE, made_by="scale_loss")
    scale = program.add_input(Port(InputRole.SCALE, "loss_scale"), fake, record, name="loss_scale")
    for tangent in tangents:
        users = list(tangent.users)
        with program.graph.inserting_after(program.placeholders()[-1]):
            scaled = program.call(aten.mul.Tensor, (tangent, scale), record, name=f"scaled_{tangent.name}")
        if tensor(scaled).dtype is not tensor(tangent).dtype:  # (a tangent of no dimensions is promoted to float32)
            with program.graph.inserting_after(scaled):
                args = (scaled, tensor(tangent).dtype)
                scaled = program.call(_CAST, args, record, name=f"cast_{tangent.name}")
        for user in users:
            user.replace_input_with(tangent, scaled)
    items = []
    for port, node in program.output_items():
        if port.role is OutputRole.GRADIENT and port.of is not InputRole.PARAMETER:  # (parameters: reduce_gradients)
            with program.graph.inserting_before(program.output_node()):
                node = program.call(
                    aten.div.Tensor,
                    (node, scale),
                    info(node).replace(made_by="scale_loss"),
                    name=f"unscaled_{node.name}",
                )
        items.append((port, node))
    program.set_outputs(items)
    return {"scaled": len(tangents)}

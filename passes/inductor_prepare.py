"""Inductor's own joint-graph passes, run as one pass of ours before anything is distributed.

They replace random operators by functions of seeds (so a recomputed dropout draws the same numbers), fold constants
and match attention patterns. Nodes they make get the record of the node they are made from.
"""

from __future__ import annotations

from zgraph.passes.contract import graph_pass
from zgraph.program import torch_private
from zgraph.program.node import NodeInfo, Phase, has_info, info, module_of, set_info, source_of
from zgraph.program.program import Program


@graph_pass(
    "inductor_prepare",
    "Inductor's joint-graph passes: seeds, constants, patterns",
    requires=("clean",),
    provides=("inductor_ready",),
    bitwise=False,
    conflicts=("sharded",),
)
def inductor_prepare(program: Program) -> dict[str, int]:
    before = set(program.graph.nodes)
    torch_private.inductor_joint_passes(program.module, program.fake_mode)
    made = 0
    for node in program.graph.nodes:
        if node.op == "output" or has_info(node):
            continue
        backward = any(has_info(a) and info(a).phase is Phase.BACKWARD for a in node.all_input_nodes)
        backward = backward or node.meta.get("partitioner_tag") == "is_backward"
        phase = Phase.BACKWARD if backward else Phase.FORWARD
        set_info(
            node,
            NodeInfo(phase, module=module_of(node.meta), source=source_of(node.meta), made_by="inductor_prepare"),
        )
        made += 1
    return {"made": made, "removed": len(before - set(program.graph.nodes))}

"""Marks the last point at which each gathered parameter may be read.

The marks cost nothing: values die after their last use anyway. They say where the author of a pass meant a parameter to
die, and the verifier refuses any later read, also through a view: without them a pass that moves a use past the mark
would silently keep the parameter alive, and with it undo what ZeRO-3 saves.
"""

from __future__ import annotations

from zgraph.passes.contract import graph_pass
from zgraph.program import ops
from zgraph.program.aliases import aliases_of
from zgraph.program.collectives import is_wait
from zgraph.program.node import Role, info
from zgraph.program.program import Fact, Program


@graph_pass(
    "release",
    "gathered parameters are released after their last use",
    requires=(Fact.SHARDED,),
    provides=(Fact.RELEASED,),
    conflicts=(Fact.KEPT, Fact.RELEASED),
)
def release(program: Program) -> dict[str, int]:
    released = 0
    output = program.output_node()
    for node in program.nodes:
        if not is_wait(node) or info(node.all_input_nodes[0]).role is not Role.GATHER:
            continue
        users = sorted({user for alias in aliases_of(node) for user in alias.users})
        if output in users:
            continue  # the model returns (a view of) its parameter
        with program.graph.inserting_after(users[-1]):
            program.call(
                ops.RELEASE,
                (node,),
                info(node).replace(role=Role.RELEASE, phase=info(users[-1]).phase, made_by="release"),
                name=f"release_{node.name}",
            )
        released += 1
    return {"released": released}

"""Removes what capture leaves and no program needs: marks, detaches and dead nodes.

Safe because each removed node returns its argument's own value: `zgraph::output` is the identity (capture inserts it
only to give every output a tangent of its own), and `detach` has no meaning in a graph that autograd does not see.
"""

from __future__ import annotations

import torch

from zgraph.passes.contract import graph_pass
from zgraph.program import ops
from zgraph.program.program import Fact, Program

_IDENTITIES = {ops.OUTPUT, torch.ops.aten.detach.default, torch.ops.aten.alias.default}


@graph_pass("cleanup", "removes identities and dead nodes", provides=(Fact.CLEAN,))
def cleanup(program: Program) -> dict[str, int]:
    removed = 0
    for node in program.nodes:
        if node.op == "call_function" and node.target in _IDENTITIES:
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            program.graph.erase_node(node)
            removed += 1
    before = len(program.graph.nodes)
    program.graph.eliminate_dead_code()
    return {"identities": removed, "dead": before - len(program.graph.nodes)}

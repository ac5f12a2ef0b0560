"""Computes parts of the forward again in the backward instead of saving them.

Which values are saved is torch's min-cut (Zheng et al.'s and functorch's "min-cut rematerialization"): with kernels
that fuse, writing and reading a cheap value costs more than making it again. Recomputed nodes are copies in the
backward phase just before their first use; random operators and collectives are never copied.
"""

from __future__ import annotations

from torch import fx

from zgraph.passes.aliases import is_random
from zgraph.passes.contract import graph_pass
from zgraph.program import torch_private
from zgraph.program.collectives import is_start, is_wait
from zgraph.program.node import NodeInfo, Phase, info, set_info
from zgraph.program.program import OutputRole, Program


@graph_pass("recompute", "cheap values are computed again in the backward, as torch's min-cut chooses", requires=("clean", "inductor_ready"), provides=("recomputed",), conflicts=("sharded",))
def recompute(program: Program) -> dict[str, int]:
    forward_outputs = sum(p.role in (OutputRole.OUTPUT, OutputRole.MUTATION) for p in program.outputs)
    if forward_outputs == len(program.outputs):
        return {"recomputed": 0}
    program.module.recompile()
    saved = torch_private.min_cut_saved(program.module, forward_outputs)
    return {"recomputed": recompute_all_but(program, saved)}


def recompute_all_but(program: Program, saved: set[str]) -> int:
    """Copy into the backward every forward node that it reads and that is not named in `saved`; returns the copies."""
    copies: dict[fx.Node, fx.Node] = {}

    def again(node: fx.Node, before: fx.Node) -> fx.Node:
        if node in copies or node.op != "call_function" or node.name in saved or info(node).phase is Phase.BACKWARD:
            return copies.get(node, node)
        if is_random(node) or is_start(node) or is_wait(node):
            return node
        for used in node.all_input_nodes:
            again(used, before)
        with program.graph.inserting_before(before):
            copied = program.graph.node_copy(node, lambda n: copies.get(n, n))
        copied.meta = dict(node.meta)
        record: NodeInfo = info(node)
        set_info(copied, record.but(phase=Phase.BACKWARD, copy_of=node.name, made_by="recompute"))
        copies[node] = copied
        return copied

    for node in program.nodes:
        if node.op == "output" or info(node).phase is not Phase.BACKWARD or node in copies.values():
            continue
        for used in node.all_input_nodes:
            if info(used).phase is Phase.FORWARD and (fresh := again(used, node)) is not used:
                node.replace_input_with(used, fresh)
    return len(copies)

"""On CPU a reduce-scatter is waited for before any other collective starts.

gloo's reduce-scatter (torch 2.13) corrupts memory when another collective of the group is in flight beside it: two ranks
that overlapped it with all-gathers died or hung once in about 200,000 of them (torch alone, no zgraph); 441,000 without
an overlap, and as many all-reduces with one, did not. NCCL has no such fault: programs for other devices stay as they are.
"""

from __future__ import annotations

from torch import fx

from zgraph.passes.contract import graph_pass
from zgraph.program import collectives
from zgraph.program.node import tensor
from zgraph.program.program import Program


@graph_pass("wait_for_gloo", "on CPU nothing overlaps a reduce-scatter", requires=("reduced",), provides=("gloo_safe",))
def wait_for_gloo(program: Program) -> dict[str, int]:
    moved = 0
    flying: dict[fx.Node, None] = {}
    for node in program.nodes:
        if collectives.is_wait(node):
            flying.pop(node.all_input_nodes[0], None)
        if not collectives.is_start(node) or tensor(node).device.type != "cpu":
            continue
        wait = next(u for u in node.users if collectives.is_wait(u))
        if node.target is not collectives.REDUCE_SCATTER:
            flying[node] = None
            continue
        for other in flying:
            node.prepend(next(u for u in other.users if collectives.is_wait(u)))
        moved += len(flying)
        flying.clear()
        if node.next is not wait:
            node.append(wait)
            moved += 1
    return {"moved": moved}

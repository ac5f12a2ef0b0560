"""The gathered weights of ZeRO stages 1 and 2 stay: they leave the program, or an earlier program has gathered them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from zgraph.passes.contract import graph_pass
from zgraph.passes.zero.gathers import gathered
from zgraph.program.node import NodeInfo, Phase, Role, info, tensor
from zgraph.program.program import InputRole, OutputRole, Port, Program


@dataclass(frozen=True)
class KeepOptions:
    """`gathered_before`: an earlier program of this optimizer step has gathered the weights; they come in whole."""

    gathered_before: bool = False


@graph_pass(
    "keep_gathered",
    "what the first forward of a step gathers is kept until the weights change",
    options=KeepOptions,
    requires=("sharded",),
    provides=("kept",),
    conflicts=("regathered",),
)
def keep_gathered(program: Program, options: KeepOptions) -> dict[str, int]:
    items = list(program.output_items())
    kept = gathered(program, Phase.FORWARD)
    shards = program.input_nodes(InputRole.PARAMETER)
    for name, whole in kept.items():
        if not options.gathered_before:
            items.append((Port(OutputRole.UNSHARDED, name), whole))
            continue
        record = NodeInfo(phase=Phase.FORWARD, param=name, made_by="keep_gathered")
        held = program.add_input(Port(InputRole.UNSHARDED, name), tensor(whole), record, name=whole.name)
        whole.replace_all_uses_with(held)
        node = whole
        while node is not shards[name]:
            source = node.all_input_nodes[0]
            program.graph.erase_node(node)
            node = source
        if not shards[name].users:
            program.remove_input(shards[name])
    program.set_outputs(items)
    return {"taken" if options.gathered_before else "kept": len(kept)}


def coming_in(program: Program) -> dict[str, fx.Node]:
    """Likewise for whole parameters that lie elsewhere: what the forward reads of one that is fetched for it."""
    found = {}
    for name, node in program.input_nodes(InputRole.PARAMETER).items():
        spec = program.params[name]
        if spec.home is not None and spec.shard_dim is None and node.users:
            cast = next((u for u in node.users if info(u).role is Role.LAYOUT), node)
            found[name] = cast
    return found

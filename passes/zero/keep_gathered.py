"""Keeps the gathered weights of ZeRO stages 1 and 2: they become outputs, or come in from an earlier program that
gathered them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from zgraph.passes.analysis.parameter_collectives import gathers_of
from zgraph.passes.contract import graph_pass
from zgraph.program.node import NodeInfo, Phase, Role, info, tensor
from zgraph.program.program import Fact, InputRole, OutputRole, Port, Program


@dataclass(frozen=True)
class KeepOptions:
    """Options of `keep_gathered`."""

    gathered_before: bool = False  # whether an earlier program of this step gathered the weights: they come in whole


@graph_pass(
    "keep_gathered",
    "what the first forward of a step gathers is kept until the weights change",
    options=KeepOptions,
    requires=(Fact.SHARDED,),
    provides=(Fact.KEPT,),
    conflicts=(Fact.REGATHERED,),
)
def keep_gathered(program: Program, options: KeepOptions) -> dict[str, int]:
    items = list(program.output_items())
    gathers = [gather for gather in gathers_of(program) if info(gather.start).phase is Phase.FORWARD]
    shards = program.input_nodes(InputRole.PARAMETER)
    for gather in gathers:
        name, whole = gather.name, gather.last
        if not options.gathered_before:
            items.append((Port(OutputRole.UNSHARDED, name), whole))
            continue
        record = NodeInfo(phase=Phase.FORWARD, param=name, made_by="keep_gathered")
        unsharded = program.add_input(Port(InputRole.UNSHARDED, name), tensor(whole), record, name=whole.name)
        whole.replace_all_uses_with(unsharded)
        for node in reversed(gather.nodes):
            program.graph.erase_node(node)
        if not shards[name].users:
            program.remove_input(shards[name])
    program.set_outputs(items)
    return {"taken" if options.gathered_before else "kept": len(gathers)}


def coming_in(program: Program) -> dict[str, fx.Node]:
    """Return the whole parameters that are offloaded, by name: of each the value that the forward reads, the parameter
    or its cast.
    """
    whole_parameters = {}
    for name, node in program.input_nodes(InputRole.PARAMETER).items():
        spec = program.params[name]
        if spec.home is not None and spec.shard_dim is None and node.users:
            cast = next((u for u in node.users if info(u).role is Role.LAYOUT), node)
            whole_parameters[name] = cast
    return whole_parameters

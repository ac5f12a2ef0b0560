"""An update whose weights, gradients or states lie elsewhere brings them to the device group by group.

*Contract.* On entry the update is in place and grouped (`group_updates`), and inputs that lie elsewhere say so (`NodeInfo.home`). On exit

    wait for group i's fetches; start group i + 1's; compute group i; wait for group i - 1's stores; start group i's

so that at most two groups of inputs and two of results are on the device, and the disk or the copy engines work while a group is
computed (the sub-groups of ZeRO-Infinity: Rajbhandari et al., 2021). What a group reads twice, in two stages, is fetched twice.
"""

from __future__ import annotations

import torch
from torch import fx

from zgraph.passes.aliases import is_write
from zgraph.passes.contract import graph_pass
from zgraph.passes.costs import size_of
from zgraph.passes.groups import groups_of
from zgraph.program import moves
from zgraph.program.node import NodeInfo, Phase, Role, info, tensor
from zgraph.program.program import Program


@graph_pass(
    "offload_update",
    "weights, gradients and states that lie elsewhere come and go group by group",
    requires=("grouped",),
    provides=("offloaded",),
    conflicts=("offloaded",),
)
def offload_update(program: Program) -> dict[str, int]:
    devices = {n: tensor(n).device for n in program.placeholders() if info(n).home is not None}
    for home in devices:
        program.put_home(home, str(info(home).home))
    groups = groups_of(program)
    fetched = stored = 0
    before: list[fx.Node] = []  # the waits for the stores of the group before
    began = _begin(program, devices, groups[0], groups[0][0], 0) if groups else {}
    for number, nodes in enumerate(groups):
        here = {
            home: _call(
                program, nodes[0], moves.MOVED, (start, home), info(start).but(role=Role.WAIT), f"here_{home.name}"
            )
            for home, start in began.items()
        }
        fetched += sum(size_of(h) for h in here)
        for node in nodes:
            if not _is_store(node):
                for home, value in here.items():
                    node.replace_input_with(home, value)
        if number + 1 < len(groups):
            began = _begin(program, devices, groups[number + 1], nodes[0], number)
        after = nodes[-1].next
        for wait in before:
            after.prepend(wait)
        before = []
        for node in [n for n in nodes if _is_store(n)]:
            home, new = node.all_input_nodes
            value = here.get(home, new)
            record = NodeInfo(
                Phase.UPDATE, Role.STORE, param=info(home).param, made_by="offload_update", group=f"out{number}"
            )
            start = _call(program, after, moves.STORE, (home, value), record, f"store_{home.name}")
            done = record.but(role=Role.WAIT, group=f"out{number + 1}")
            before.append(_call(program, after, moves.MOVED, (start, value), done, f"away_{home.name}"))
            if value is new:
                program.graph.erase_node(node)
            else:  # (written over what was fetched, which goes as it lies)
                node.replace_input_with(home, value)
            stored += size_of(home)
    output = program.output_node()
    for wait in before:
        output.prepend(wait)
    return {"fetched_bytes": fetched, "stored_bytes": stored}


def _is_store(node: fx.Node) -> bool:
    return is_write(node) and info(node.all_input_nodes[0]).home is not None


def _begin(
    program: Program, devices: dict[fx.Node, torch.device], nodes: list[fx.Node], at: fx.Node, number: int
) -> dict[fx.Node, fx.Node]:
    """Start to fetch what a group reads, before `at`."""
    homes = dict.fromkeys(a for n in nodes if not _is_store(n) for a in n.all_input_nodes if a in devices)
    record = NodeInfo(Phase.UPDATE, Role.FETCH, made_by="offload_update", group=f"in{number}")
    return {
        home: _call(
            program, at, moves.FETCH, (home, devices[home]), record.but(param=info(home).param), f"fetch_{home.name}"
        )
        for home in homes
    }


def _call(
    program: Program, before: fx.Node, target: object, args: tuple[object, ...], record: NodeInfo, name: str
) -> fx.Node:
    with program.graph.inserting_before(before):
        return program.call(target, args, record, name=name)

"""An update whose weights, gradients or states are offloaded: where it is computed, and which values move for it.

*Contract.* On entry the update is in place and grouped (`group_updates`), and offloaded inputs say so
(`NodeInfo.home`). On exit each group runs either on the device or on the host. One that reads nothing offloaded runs on
the device. One that does runs on the host's processors (with `host`; ZeRO-Offload: Ren et al., 2021, "ZeRO-Offload:
Democratizing Billion-Scale Model Training"), where what is stored in host memory is read and written in place, unless
it communicates or multiplies matrices; else on the device too. Values that a group needs from another place are fetched
before it, values that it makes for another place are sent after it:

    wait for what group i needs; start what group i + 1 needs; compute group i; wait for what group i - 1 sent; start what group i sends

so that at most two groups of values are in flight in each direction, and links and disks work while a group is computed
(the sub-groups of ZeRO-Infinity: Rajbhandari et al., 2021). What a group reads twice, in two stages, is fetched twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zgraph.passes.analysis.costs import flops_of, size_of
from zgraph.passes.contract import graph_pass
from zgraph.passes.update.group_updates import groups_of
from zgraph.program import collectives, transfers_to_host
from zgraph.program.aliases import is_write
from zgraph.program.node import NodeInfo, Phase, Role, info, set_info, tensor
from zgraph.program.program import Fact, Program

HOST = torch.device("cpu")


@dataclass(frozen=True)
class OffloadUpdateOptions:
    """Options of `offload_update`."""

    host: bool = True  # whether updates of offloaded values are computed on the host's processors


@graph_pass(
    "offload_update",
    "what lies elsewhere is updated on the host, or comes and goes group by group",
    options=OffloadUpdateOptions,
    requires=(Fact.GROUPED,),
    provides=(Fact.OFFLOADED,),
    conflicts=(Fact.OFFLOADED,),
)
def offload_update(program: Program, options: OffloadUpdateOptions) -> dict[str, int]:
    builder = _Places(program, options.host)
    groups = groups_of(program)
    on_host = [builder.may_run_on_host(nodes) for nodes in groups]
    copies: dict[fx.Node, fx.Node] = {}  # the fetched copy of each value that a group needs
    sent: list[fx.Node] = []  # the waits of what the group before sends, and the writes of it
    for number, nodes in enumerate(groups):
        copies = builder.arrive(nodes, on_host[number], number)
        for node in nodes:
            builder.compute(node, copies, on_host[number])
        if number + 1 < len(groups):
            builder.begin(groups[number + 1], on_host[number + 1], nodes, number)
        after = nodes[-1].next
        for node in sent:
            after.prepend(node)
        sent = [
            n for node in nodes if is_write(node) for n in builder.send(node, copies, after, on_host[number], number)
        ]
    for node in sent:
        program.output_node().prepend(node)
    return {"fetched_bytes": builder.fetched, "stored_bytes": builder.stored, "on_host": sum(on_host)}


class _Places:
    """The place of each value, and the moves between places. `begun` are the fetches in flight."""

    def __init__(self, program: Program, host: bool) -> None:
        self.program = program
        self.device = next((tensor(n).device for n in program.placeholders()), HOST)
        self.homes = {n for n in program.placeholders() if info(n).home is not None}
        self.host = host
        for home in self.homes:
            program.put_home(home, str(info(home).home))
        self.begun: dict[fx.Node, fx.Node] = {}
        self.shared: dict[tuple[fx.Node, torch.device], fx.Node] = {}  # copies of numbers, by value and device
        self.fetched = self.stored = 0

    def may_run_on_host(self, nodes: list[fx.Node]) -> bool:
        reads = {a for n in nodes for a in n.all_input_nodes}
        apart = any(collectives.is_start(n) or flops_of(n) for n in nodes) or any(a.op == "get_attr" for a in reads)
        return self.host and not apart and any(a in self.homes for a in reads)

    def _needs(self, nodes: list[fx.Node], on_host: bool) -> dict[fx.Node, torch.device]:
        """Return the values that these nodes read and that are not where the nodes run, each with the device on which
        they run.
        """
        place = HOST if on_host else self.device
        needs: dict[fx.Node, torch.device] = {}
        for value in (a for n in nodes for a in _read(n)):
            is_stored_there = on_host and info(value).home == "cpu"
            apart = value in self.homes or tensor(value).device != place
            if value not in nodes and apart and not is_stored_there:
                needs[value] = place
        return needs

    def begin(self, nodes: list[fx.Node], on_host: bool, before: list[fx.Node], number: int) -> None:
        """Start fetching the values that `nodes` need and that exist already, before the first node of the group
        `before` them.
        """
        for value, place in self._needs(nodes, on_host).items():
            if value not in before:
                self._fetch(value, place, before[0], f"in{number + 1}")

    def arrive(self, nodes: list[fx.Node], on_host: bool, number: int) -> dict[fx.Node, fx.Node]:
        """Return the fetched copy of each value that these nodes need, after inserting its wait."""
        copies: dict[fx.Node, fx.Node] = {}
        needs = self._needs(nodes, on_host)
        for value, place in needs.items():  # (all before the first wait: the waits are a group, which runs as one)
            self._fetch(value, place, nodes[0], f"late{number}")
        for value, place in needs.items():
            if (value, place) in self.shared:
                copies[value] = self.shared[value, place]
                continue
            start = self.begun.pop(value)
            record = info(start).replace(role=Role.WAIT, group=f"here{number}")
            copies[value] = self._call(nodes[0], transfers_to_host.MOVED, (start, value), record, f"here_{value.name}")
            self.fetched += size_of(value)
            if not tensor(value).dim() and value not in self.homes:
                self.shared[value, place] = copies[value]
        return copies

    def compute(self, node: fx.Node, here: dict[fx.Node, fx.Node], on_host: bool) -> None:
        """Let a node run in its group's place."""
        for value in _read(node):
            if value in here:
                node.replace_input_with(value, here[value])
        if on_host and (not is_write(node) or info(node.all_input_nodes[0]).home == "cpu"):
            self._put_on_host(node)

    def _put_on_host(self, node: fx.Node) -> None:
        if self.device != HOST:
            node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), _on_host)  # type: ignore[assignment]
            node.meta["val"] = self.program.evaluate(node)
            set_info(node, info(node).replace(home="cpu"))

    def send(
        self, node: fx.Node, here: dict[fx.Node, fx.Node], after: fx.Node, on_host: bool, number: int
    ) -> list[fx.Node]:
        """Start sending a write's new value to another place; return the waits, and the write if it comes after them."""
        target, new = node.all_input_nodes
        record = NodeInfo(
            Phase.UPDATE, Role.STORE, param=info(target).param, made_by="offload_update", group=f"out{number}"
        )
        done = record.replace(role=Role.WAIT, group=f"away{number}")
        if target in self.homes:
            if on_host and info(target).home == "cpu":
                return []  # (it is written in place)
            value = here.get(target, new)  # (a fetched copy is overwritten and sent)
            start = self._call(after, transfers_to_host.STORE, (target, value), record, f"store_{target.name}")
            wait = self._call(after, transfers_to_host.MOVED, (start, value), done, f"away_{target.name}")
            if value is new:
                self.program.graph.erase_node(node)
            else:
                node.replace_input_with(target, value)
                if on_host:
                    self._put_on_host(node)
            self.stored += size_of(target)
            return [wait]
        if tensor(new).device == tensor(target).device:
            return []
        start = self._call(
            after, transfers_to_host.FETCH, (new, self.device), record.replace(role=Role.FETCH), f"up_{target.name}"
        )
        wait = self._call(after, transfers_to_host.MOVED, (start, new), done, f"new_{target.name}")
        node.replace_input_with(new, wait)
        set_info(node, info(node).replace(group=f"away{number}"))
        self.fetched += size_of(target)
        return [wait, node]

    def _fetch(self, value: fx.Node, place: torch.device, before: fx.Node, group: str) -> None:
        if value in self.begun or (value, place) in self.shared:
            return
        home = "cpu" if place == HOST != self.device else None
        record = NodeInfo(
            Phase.UPDATE, Role.FETCH, param=info(value).param, made_by="offload_update", group=group, home=home
        )
        self.begun[value] = self._call(before, transfers_to_host.FETCH, (value, place), record, f"fetch_{value.name}")

    def _call(self, before: fx.Node, target: object, args: tuple[object, ...], record: NodeInfo, name: str) -> fx.Node:
        with self.program.graph.inserting_before(before):
            return self.program.call(target, args, record, name=name)


def _read(node: fx.Node) -> list[fx.Node]:
    """Return the operands whose values a node reads: of a write, the new value."""
    return node.all_input_nodes[1:] if is_write(node) else node.all_input_nodes


def _on_host(leaf: Any) -> Any:
    return HOST if isinstance(leaf, torch.device) else leaf

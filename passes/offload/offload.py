"""Offloads parameters, activations and gradients of forward and backward, as starts and waits of moves.

*Contract.* On entry the program is scheduled, and every value is on the device. On exit a parameter with a home
(`ParamSpec.home`) comes in from its tier and is fetched before each visit to it, a reduced gradient with one
(`ParamSpec.grad_home`) leaves to its tier, and the chosen activations are in their tier between forward and backward:

    parameter    p                  ->  fetch -> moved before the first reader of each visit
    activation   x, read backward   ->  offload -> moved in the forward; fetch -> moved before its first reader in the backward
    gradient     g                  ->  offload -> moved, as soon as it is reduced

A fetch starts just early enough that no reader waits for it; an offload is waited for when it should be done; both
within `staging` bytes in flight. Views of an activation are computed again from the fetched value, not moved (after
ZeRO-Infinity: Rajbhandari et al., 2021, "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning").
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from zgraph.passes.analysis.costs import CPU, Costs, most_bytes
from zgraph.passes.analysis.saved_values import crossings, made_by_forward, part_phases
from zgraph.passes.contract import graph_pass
from zgraph.program import collectives, transfers_to_host
from zgraph.program.node import NodeInfo, Phase, Role, info, tensor
from zgraph.program.program import Fact, InputRole, OutputRole, Program

aten = torch.ops.aten

SAFETY_FACTOR = 1.3  # a fetch may take this many times as long as the forecast


@dataclass(frozen=True)
class OffloadOptions:
    """Options of `offload`."""

    activations: str | None = None  # the tier that activations go to, None to keep them on the device
    # the most bytes of activations that go, None: all; those that the forward makes first go first: they are read last
    most: int | None = None
    least: int = 0  # the fewest bytes of an activation that goes
    staging: int | None = None  # the most bytes in flight in each direction; None: twice the largest value that moves
    costs: Costs = field(default_factory=lambda: Costs(CPU))  # says how long moves take


@dataclass(eq=False)
class Move:
    """A move between the device and a tier."""

    start: fx.Node  # the node that starts it
    wait: fx.Node  # the node that waits for it
    bytes: int  # the bytes that it moves, at the program's largest sizes
    seconds: float  # how long it takes, alone


@graph_pass(
    "offload",
    "values lie in other memory or on disk while nothing reads them",
    options=OffloadOptions,
    requires=(Fact.SCHEDULED,),
    provides=(Fact.OFFLOADED,),
    conflicts=(Fact.OFFLOADED,),
)
def offload(program: Program, options: OffloadOptions) -> dict[str, int]:
    part_phases(program)
    builder = _Offload(program, options.costs)
    builder.parameters(options.staging)
    if options.activations is not None:
        builder.activations(options.activations, options.most, options.least)
    if Fact.PARTIAL not in program.facts:  # (unreduced gradients are added up on the device)
        builder.gradients()
    staging = options.staging
    if staging is None:
        staging = 2 * max((m.bytes for m in (*builder.fetched, *builder.stored)), default=0)
    seconds = options.costs.compute(program)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        place(program, phase, builder.fetched, builder.stored, seconds, staging)
    return {
        "fetches": len(builder.fetched),
        "fetched_bytes": sum(m.bytes for m in builder.fetched),
        "stores": len(builder.stored),
        "stored_bytes": sum(m.bytes for m in builder.stored),
    }


class _Offload:
    """A program into which moves are inserted, each beside the operator that it serves."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program = program
        self.costs = costs
        self.fetched: list[Move] = []
        self.stored: list[Move] = []

    def parameters(self, staging: int | None) -> None:
        homes = {n: p for n, p in self.program.input_nodes(InputRole.PARAMETER).items() if self.program.params[n].home}
        at = {node: i for i, node in enumerate(self.program.graph.nodes)}
        reads = sorted((at[u], n) for n, p in homes.items() for u in p.users if u.op != "output")
        close = 2 * max((most_bytes(p) for p in homes.values()), default=0) if staging is None else staging
        for name, node in homes.items():
            device = tensor(node).device
            self.program.put_home(node, str(self.program.params[name].home))
            for readers in self._visits(name, node, at, reads, homes, close):
                here = self._fetch(node, device, readers[0], param=name)
                for user in readers:
                    user.replace_input_with(node, here)

    def _visits(
        self,
        name: str,
        node: fx.Node,
        at: dict[fx.Node, int],
        reads: list[tuple[int, str]],
        homes: dict[str, fx.Node],
        close: int,
    ) -> list[list[fx.Node]]:
        """Return a parameter's readers in groups: a new one begins where the phase changes, or where more than `close`
        bytes of other parameters are read in between.
        """
        visits: list[list[fx.Node]] = []
        for user in sorted(u for u in node.users if u.op != "output"):
            if visits and info(visits[-1][-1]).phase is info(user).phase:
                low, high = bisect.bisect(reads, (at[visits[-1][-1]], name)), bisect.bisect(reads, (at[user], name))
                between = {n for _, n in reads[low:high]} - {name}
                if sum(most_bytes(homes[n]) for n in between) <= close:
                    visits[-1].append(user)
                    continue
            visits.append([user])
        return visits

    def activations(self, tier: str, most: int | None, least: int) -> None:
        gone = 0
        for crossing in crossings(self.program):
            root = crossing.root
            if most_bytes(root) < least or not made_by_forward(root):
                continue
            gone += most_bytes(root)
            if most is not None and gone > most:
                return
            away = self._store(root, tier)
            crossing.read_instead(self.program, self._fetch(away, tensor(root).device, crossing.first), "offload")

    def gradients(self) -> None:
        items = list(self.program.output_items())
        for i, (port, node) in enumerate(items):
            home = self.program.params[port.name].grad_home if port.name in self.program.params else None
            if port.role is OutputRole.GRADIENT and port.of is InputRole.PARAMETER and home is not None:
                items[i] = (port, self._store(self._dense(port.name, node), home, param=port.name))
        self.program.set_outputs(items)

    def _dense(self, name: str, grad: fx.Node) -> fx.Node:
        """Return a gradient with the strides of its parameter (an update would copy it, and only dense values can be
        moved).
        """
        strides = self.program.params[name].shard_stride
        if tensor(grad).stride() == strides:
            return grad
        record = info(grad).replace(role=Role.LAYOUT, param=name, made_by="offload")
        order = sorted(range(len(strides)), key=lambda d: (-strides[d], d))
        rows = {"memory_format": torch.contiguous_format}
        with self.program.graph.inserting_before(self.program.behind(grad).next):
            node = self.program.call(aten.permute.default, (grad, order), record, name=f"rows_{grad.name}")
            node = self.program.call(aten.clone.default, (node,), record, kwargs=rows, name=f"dense_{grad.name}")
            back = [order.index(d) for d in range(len(order))]
            return self.program.call(aten.permute.default, (node, back), record, name=f"laid_{grad.name}")

    # -- building -------------------------------------------------------------------------------------------------------
    def _fetch(self, home: fx.Node, device: torch.device, reader: fx.Node, param: str | None = None) -> fx.Node:
        record = NodeInfo(info(reader).phase, Role.FETCH, info(reader).module, param=param, made_by="offload")
        name = param.replace(".", "_") if param else home.name.removeprefix("away_")
        while _joined(reader.prev, reader):
            reader = reader.prev
        with self.program.graph.inserting_before(reader):
            start = self.program.call(transfers_to_host.FETCH, (home, device), record, name=f"fetch_{name}")
            wait = self.program.call(
                transfers_to_host.MOVED, (start, home), record.replace(role=Role.WAIT), name=f"here_{name}"
            )
        self.fetched.append(Move(start, wait, most_bytes(home), self.costs.move(start)))
        return wait

    def _store(self, node: fx.Node, tier: str, param: str | None = None) -> fx.Node:
        record = info(node).replace(
            role=Role.STORE, param=param, made_by="offload", home=tier, copy_of=None, transfer=None
        )
        after = self.program.behind(node)
        while after.next.op == "call_function" and after.next.target is transfers_to_host.OFFLOAD:
            after = after.next
        with self.program.graph.inserting_after(after):
            start = self.program.call(transfers_to_host.OFFLOAD, (node, tier), record, name=f"offload_{node.name}")
        with self.program.graph.inserting_after(start):
            wait = self.program.call(
                transfers_to_host.MOVED, (start, node), record.replace(role=Role.WAIT), name=f"away_{node.name}"
            )
        self.stored.append(Move(start, wait, most_bytes(node), self.costs.move(start)))
        return wait


def _joined(one: fx.Node, other: fx.Node) -> bool:
    """Return whether two nodes are starts of one bucket. (Nothing may come between these.)"""
    starts = collectives.is_start(one) and collectives.is_start(other)
    return starts and info(one).bucket is not None and info(one).bucket == info(other).bucket


# -- when ---------------------------------------------------------------------------------------------------------------
def place(
    program: Program,
    phase: Phase,
    fetched: Sequence[Move],
    stored: Sequence[Move],
    seconds: dict[fx.Node, float],
    staging: int,
) -> None:
    """Move, within a phase, the starts of fetches earlier and the waits of offloads later, with `staging` bytes in
    flight each way.
    """
    nodes: list[fx.Node] = []
    at: dict[fx.Node, int] = {}  # the number of the phase's operators before each start and wait
    ends = {n for m in (*fetched, *stored) for n in (m.start, m.wait)}
    for node in program.graph.nodes:
        if node.op == "call_function" and info(node).phase is phase:
            if node in ends:
                at[node] = len(nodes)
            else:
                nodes.append(node)
    clock = [0.0, *itertools.accumulate(seconds.get(n, 0.0) for n in nodes)]
    _place_fetches([m for m in fetched if m.wait in at], nodes, at, clock, staging)
    _place_stores([m for m in stored if m.start in at], nodes, at, clock, staging)


def _place_fetches(
    fetched: list[Move], nodes: list[fx.Node], at: dict[fx.Node, int], clock: list[float], staging: int
) -> None:
    ordered = sorted(fetched, key=lambda m: at[m.wait])
    wanted: list[int] = []
    until = clock[-1]
    for move in reversed(ordered):
        until = min(until, clock[at[move.wait]]) - SAFETY_FACTOR * move.seconds
        wanted.insert(0, max(0, bisect.bisect_right(clock, until) - 1))
    flying: deque[Move] = deque()
    first = 0
    for move, position in zip(ordered, wanted, strict=True):
        first = max(first, min(position, at[move.wait]))
        while flying and at[flying[0].wait] < first:
            flying.popleft()
        while flying and sum(m.bytes for m in flying) + move.bytes > staging:
            first = max(first, at[flying.popleft().wait])
        flying.append(move)
        if first < at[move.wait]:
            nodes[first].prepend(move.start)
        else:
            move.wait.prepend(move.start)


def _place_stores(
    stored: list[Move], nodes: list[fx.Node], at: dict[fx.Node, int], clock: list[float], staging: int
) -> None:
    ordered = sorted(stored, key=lambda m: at[m.start])
    flying: deque[tuple[Move, float]] = deque()
    free = 0.0

    def land(position: int) -> None:
        move, _ = flying.popleft()
        if min(position, len(nodes)) <= at[move.start]:
            return  # (the wait stays where it is)
        if position < len(nodes):
            nodes[position].prepend(move.wait)
        else:
            nodes[-1].append(move.wait)

    for move in ordered:
        now = at[move.start]
        while flying and (flying[0][1] <= clock[now] or sum(m.bytes for m, _ in flying) + move.bytes > staging):
            land(min(bisect.bisect_left(clock, flying[0][1]), now))
        free = max(free, clock[now]) + move.seconds
        flying.append((move, free))
    while flying:
        land(bisect.bisect_left(clock, flying[0][1]))

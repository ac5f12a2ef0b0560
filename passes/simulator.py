"""Replays a program on streams, without running it: step time, what communication is exposed, memory at every node.

One compute stream runs the nodes in order. A collective runs on its link from its start, or from when the link is free;
its wait holds the compute stream up until it is done. What the compute stream waits for is exposed. All data-parallel
collectives share one link, whatever their mesh dimension: a second process group is no second network. Moves to and from
memory of the host run on a copy engine each way, reads and writes of a disk on the disk. What lies there takes no memory here.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass, field

from torch import fx

from zgraph.passes.costs import Costs, own_bytes, size_of, tier_of
from zgraph.passes.fusion import pointwise, positions, sources
from zgraph.program import collectives, moves
from zgraph.program.node import Phase, Role, info
from zgraph.program.program import InputRole, OutputRole, Port, Program

_INPUTS = {
    InputRole.PARAMETER: "parameters",
    InputRole.STATE: "states",
    InputRole.KEPT: "gathered",
    InputRole.GRADIENT: "gradients",
    InputRole.ACCUMULATOR: "gradients",
    InputRole.SAVED: "activations",
}


@dataclass(frozen=True)
class Stall:
    """The compute stream waits at `node` for `seconds`, for a collective or a move with this role."""

    node: str
    role: Role
    seconds: float


@dataclass(frozen=True)
class Forecast:
    """What one run of a program will take.

    `seconds` from the first node to the end of the last one and of every collective; `busy` seconds by stream; `stalls`
    where communication is exposed, in order. `moved` are bytes between the device and elsewhere: "nvme read", "nvme write", "h2d",
    "d2h". `memory` has the live bytes by category after each node of the program, in
    order: inputs count for as long as the program runs, other values to their last reader, views with what they look at.
    """

    program: str
    seconds: float
    busy: dict[str, float]
    stalls: tuple[Stall, ...]
    memory: tuple[dict[str, int], ...]
    moved: dict[str, int] = field(default_factory=dict)

    @property
    def exposed(self) -> dict[str, float]:
        """Seconds that the compute stream waits, by what for: "gather", "reduce", "fetch", "store"."""
        found: Counter[str] = Counter()
        for stall in self.stalls:
            found[stall.role.value] += stall.seconds  # type: ignore[assignment]
        return dict(found)

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by category where they are most."""
        return max(self.memory, key=lambda m: sum(m.values()), default={})

    def __str__(self) -> str:
        lines = [f"{self.program}: {self.seconds * 1e3:.3f} ms"]
        lines += [f"  {name:12} {t * 1e3:10.3f} ms  {t / self.seconds:6.1%}" for name, t in sorted(self.busy.items())]
        lines += [f"  exposed {name:4}{t * 1e3:11.3f} ms  {t / self.seconds:6.1%}" for name, t in self.exposed.items()]
        lines += [f"  moved {name:11}{size / 2**20:10.1f} MiB" for name, size in sorted(self.moved.items())]
        lines.append(f"  peak memory  {sum(self.peak.values()) / 2**20:10.1f} MiB")
        lines += [f"    {k:12} {v / 2**20:8.1f} MiB" for k, v in sorted(self.peak.items(), key=lambda i: -i[1]) if v]
        return "\n".join(lines)


@dataclass(frozen=True)
class StepForecast:
    """What a step of one micro-batch will take: its `programs` (forward and backward, then the update, if the plan has one)
    one after another, and `besides` seconds of the run time around them, where the hardware was measured."""

    programs: tuple[Forecast, ...]
    besides: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(p.seconds for p in self.programs) + self.besides

    @property
    def exposed(self) -> float:
        """Seconds of communication that nothing hides."""
        return sum(sum(p.exposed.values()) for p in self.programs)

    @property
    def moved(self) -> dict[str, int]:
        """Bytes between the device and elsewhere, as in `Forecast`."""
        found: Counter[str] = Counter()
        for program in self.programs:
            found.update(program.moved)
        return dict(found)

    def __str__(self) -> str:
        lines = [str(p) for p in self.programs]
        if self.besides:
            lines.append(f"besides: {self.besides * 1e3:.3f} ms")
        exposed = f"{self.exposed * 1e3:.3f} ms ({self.exposed / self.seconds:.1%}) of it exposed communication"
        return "\n".join([*lines, f"step: {self.seconds * 1e3:.3f} ms, {exposed}"])


def simulate_step(program: Program, update: Program | None, costs: Costs) -> StepForecast:
    """Replay a step: forward and backward as one `program`, then its `update`. The first gathers of the forward run beside
    the update of the step before. Raises as `simulate`."""
    after = () if update is None else (simulate(update, costs),)
    first = simulate(program, costs, lead=sum(u.seconds for u in after))
    return StepForecast((first, *after), costs.hardware.step)


def simulate(program: Program, costs: Costs, lead: float = 0.0) -> Forecast:
    """Replay a program of any level. What starts ahead of it (`NodeInfo.ahead`) has `lead` seconds before the first node.

    Raises `PlanError` where the hardware has no link for a mesh dimension.
    """
    compute = costs.compute(program)
    clock = 0.0
    free = -lead  # when the link is
    lanes: dict[str, float] = {}  # when each copy engine and disk is
    done: dict[fx.Node, float] = {}
    busy: Counter[str] = Counter()
    stalls: list[Stall] = []
    moved: Counter[str] = Counter()
    for node in program.graph.nodes:
        if collectives.is_start(node):
            if node in done:  # (with the bucket)
                continue
            starts = bucket_of(node)
            dim = str(info(node).mesh_dim)
            name = f"link:{dim if dim in costs.hardware.links else '*'}"
            seconds, work = costs.transfer(starts, program.mesh[dim]), costs.work(starts)
            clock += work
            free = max(clock - lead if info(node).ahead else clock, free) + seconds
            done.update(dict.fromkeys(starts, free))
            busy[name] += seconds  # type: ignore[assignment]
            busy["compute"] += work  # type: ignore[assignment]
        elif moves.is_start(node):
            lane, seconds = lane_of(node), costs.move(node)
            way = f" {'read' if node.target is moves.FETCH else 'write'}" if lane == "nvme" else ""
            moved[lane + way] += size_of(moves.moved_value(node))
            done[node] = lanes[lane] = max(clock, lanes.get(lane, 0.0)) + seconds
            busy[lane] += seconds  # type: ignore[assignment]
        elif collectives.is_wait(node) or moves.is_wait(node):
            start = node.all_input_nodes[0]
            if done.get(start, 0.0) > clock:
                stalls.append(Stall(node.name, info(start).role, done[start] - clock))
                clock = done[start]
        elif node in compute:
            clock += compute[node]
            busy["compute"] += compute[node]  # type: ignore[assignment]
    end = max(clock, free, *lanes.values())
    return Forecast(program.name, end, dict(busy), tuple(stalls), tuple(memory_of(program, costs.fused)), dict(moved))


def lane_of(start: fx.Node) -> str:
    """What a move occupies: "nvme" (reads and writes alike), "h2d" or "d2h"."""
    if tier_of(start) == "nvme":
        return "nvme"
    return "h2d" if start.target is moves.FETCH else "d2h"


def bucket_of(start: fx.Node) -> list[fx.Node]:
    """The starts from this one on that are one transfer with it."""
    found = [start]
    name = info(start).bucket
    while name is not None and collectives.is_start(found[-1].next) and info(found[-1].next).bucket == name:
        found.append(found[-1].next)
    return found


# -- memory -----------------------------------------------------------------------------------------------------------
def memory_of(program: Program, fused: bool = False) -> list[dict[str, int]]:
    """Live bytes by category after each node, in order. `fused` says whether the backend fuses: what stays inside a kernel then
    takes none, and a kernel's result takes the place of an operand that dies there."""
    nodes = list(program.graph.nodes)
    on = sources(nodes, fused)
    at = positions(nodes, on, fused)
    last: dict[fx.Node, int] = {}
    backward: set[fx.Node] = set()
    born = dict(at)
    for node in nodes:
        if node.target is operator.getitem and on[node] == (node,):  # made by the operator that gives several values
            born[node] = born[node.all_input_nodes[0]]
        if fused and on[node] != (node,) and node.op == "call_function":
            continue  # (a view, or inside of a kernel: its readers read)
        for used in (s for a in node.all_input_nodes for s in on[a]):
            last[used] = max(last.get(used, 0), at[node])
            if info(node).phase is Phase.BACKWARD:
                backward.add(used)
        for own in on[node]:
            last.setdefault(own, at[node])
    categories = {node: _INPUTS.get(port.role, "inputs") for port, node in program.input_items()}  # type: ignore[arg-type]
    given = {root: p for p, n in program.output_items() if n in on for root in on[n]}
    for node in categories:
        last[node] = len(nodes)
    changes: list[Counter[str]] = [Counter() for _ in range(len(nodes) + 1)]
    for node in nodes:
        if on[node] != (node,) or node.op == "output" or info(node).home is not None:
            continue
        category = categories.get(node) or _category(node, given, node in backward)
        size = own_bytes(node)
        changes[born[node]][category] += size
        if last[node] < len(nodes) and node not in given:
            replaced = fused and _replaced(nodes[last[node]], node, on)
            changes[last[node] + (not replaced)][category] -= size
    live: Counter[str] = Counter()
    found = []
    for change in changes[: len(nodes)]:
        live.update(change)
        found.append(dict(live))
    return found


def _replaced(reader: fx.Node, value: fx.Node, on: dict[fx.Node, tuple[fx.Node, ...]]) -> bool:
    """Is `value` overwritten by its last reader's result? (Inductor does it within a phase, by a pointwise kernel.)"""
    if (
        on[reader] != (reader,)
        or not pointwise(reader)
        or value.op == "placeholder"
        or size_of(reader) != size_of(value)
    ):
        return False
    if info(value).phase is not info(reader).phase:
        return False
    dying = [s for a in reader.all_input_nodes for s in on[a] if size_of(s) == size_of(value) and _made_here(s)]
    return bool(dying) and value is dying[0]


def _made_here(value: fx.Node) -> bool:
    """Is this memory that a kernel of the program was given? (Inductor writes over no other.)"""
    return value.op != "placeholder" and value.target is not moves.FETCH


def _category(node: fx.Node, given: dict[fx.Node, Port], read_in_backward: bool) -> str:
    record = info(node)
    if node.target is moves.FETCH:
        return "fetched"
    if collectives.is_start(node) and record.role is Role.GATHER:
        return "gathered"
    port = given.get(node)
    if port is not None and port.role is OutputRole.GRADIENT:
        return "gradients"
    if record.phase is Phase.FORWARD and read_in_backward:
        return "activations"
    return "outputs" if port is not None else "temporaries"

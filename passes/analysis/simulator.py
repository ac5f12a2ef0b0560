"""Replays a program on streams, without running it: step time, what communication is exposed, memory at every node.

One compute stream runs the nodes in order. A collective runs on its link from its start, or from when the link is free;
its wait holds the compute stream up until it is done. What the compute stream waits for is exposed. All data-parallel
collectives share one link, whatever their mesh dimension: a second process group is no second network. Moves to and
from host memory run on one copy engine each way, reads and writes of a disk on the disk, updates on the host on its
processors. What is stored on the host or on disk takes no memory of the device.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import fx

from zgraph.passes.analysis.costs import Costs, on_host, size_of, tier_of
from zgraph.passes.analysis.live_memory import memory_of
from zgraph.passes.analysis.timeline import COMPUTE, HOST, LINK, Span, Timeline
from zgraph.program import collectives, transfers_to_host
from zgraph.program.groups import ranks_in
from zgraph.program.node import Role, info
from zgraph.program.program import Program


@dataclass(frozen=True)
class Stall:
    """A wait of the compute stream (or of the host) for a transfer that is not done."""

    node: str  # the node that waits
    role: Role  # what the transfer is for
    seconds: float  # how long it waits
    lane: str = "compute"  # the stream that waits: "compute" or "host"


@dataclass(frozen=True)
class Forecast:
    """The time and memory that one run of a program will take."""

    program: str  # the program's name
    seconds: float  # from the first node to the end of the last one and of every collective
    busy: dict[str, float]  # seconds in use, by lane
    stalls: tuple[Stall, ...]  # where communication is exposed, in order
    memory: tuple[dict[str, int], ...]  # live bytes by category after each node, in order (see `memory_of`)
    moved: dict[str, int] = field(default_factory=dict)  # bytes by way: "nvme read", "nvme write", "h2d", "d2h"
    spans: tuple[Span, ...] = field(default=(), repr=False)  # what the lanes do
    clock: tuple[float, ...] = field(default=(), repr=False)  # when the device is done with each node, in order

    @property
    def exposed(self) -> dict[str, float]:
        """Seconds that the compute stream waits, by the transfer's role: "gather", "reduce", "fetch", "store"."""
        seconds: Counter[str] = Counter()
        for stall in self.stalls:
            seconds[stall.role.value] += stall.seconds  # type: ignore[assignment]
        return dict(seconds)

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by category at the position with the most bytes."""
        return max(self.memory, key=lambda m: sum(m.values()), default={})

    def __str__(self) -> str:
        whole = self.seconds or 1.0  # (an empty program takes no time, nor does any part of it)
        lines = [f"{self.program}: {self.seconds * 1e3:.3f} ms"]
        lines += [f"  {name:12} {t * 1e3:10.3f} ms  {t / whole:6.1%}" for name, t in sorted(self.busy.items())]
        lines += [f"  exposed {name:4}{t * 1e3:11.3f} ms  {t / whole:6.1%}" for name, t in self.exposed.items()]
        lines += [f"  moved {name:11}{size / 2**20:10.1f} MiB" for name, size in sorted(self.moved.items())]
        lines.append(f"  peak memory  {sum(self.peak.values()) / 2**20:10.1f} MiB")
        lines += [f"    {k:12} {v / 2**20:8.1f} MiB" for k, v in sorted(self.peak.items(), key=lambda i: -i[1]) if v]
        return "\n".join(lines)


@dataclass(frozen=True)
class StepForecast:
    """The time that a step will take: its programs one after another, and a late update beside them, as far as the
    device has time for it.
    """

    programs: tuple[Forecast, ...]  # forward and backward of each micro-batch, then the update, if the plan has one
    besides: float = 0.0  # seconds of the runtime around the programs, where the hardware was measured
    late: bool = False  # whether the update runs beside the other programs
    runs: tuple[int, ...] = ()  # how often each program runs; once if it is empty

    def times(self) -> list[tuple[Forecast, int]]:
        """Return each program with the number of times that it runs."""
        return list(zip(self.programs, self.runs or (1,) * len(self.programs), strict=True))

    @property
    def seconds(self) -> float:
        parts = [p.seconds * runs for p, runs in self.times()]
        if not self.late:
            return sum(parts) + self.besides
        busy = sum(p.busy.get("compute", 0.0) * runs for p, runs in self.times())
        return max(sum(parts[:-1]), parts[-1], busy) + self.besides

    @property
    def exposed(self) -> float:
        """Seconds of communication that nothing hides."""
        return sum(sum(p.exposed.values()) * runs for p, runs in self.times())

    @property
    def moved(self) -> dict[str, int]:
        """Bytes between the device and elsewhere, as in `Forecast`."""
        moved_bytes: Counter[str] = Counter()
        for program, runs in self.times():
            moved_bytes.update({way: size * runs for way, size in program.moved.items()})
        return dict(moved_bytes)

    def __str__(self) -> str:
        lines = [f"{runs} times {p}" if runs > 1 else str(p) for p, runs in self.times()]
        if self.besides:
            lines.append(f"besides: {self.besides * 1e3:.3f} ms")
        share = self.exposed / self.seconds if self.seconds else 0.0
        exposed = f"{self.exposed * 1e3:.3f} ms ({share:.1%}) of it exposed communication"
        return "\n".join([*lines, f"step: {self.seconds * 1e3:.3f} ms, {exposed}"])


def simulate_step(program: Program, update: Program | None, costs: Costs, late: bool = False) -> StepForecast:
    """Replay a step: forward and backward as one `program`, then its `update`, or beside them if it is `late`.

    The first gathers of the forward run beside the update of the step before. Raises as `simulate`.
    """
    after = () if update is None else (simulate(update, costs),)
    first = simulate(program, costs, lead=0.0 if late else sum(u.seconds for u in after))
    return StepForecast((first, *after), costs.hardware.step, late)


def simulate(program: Program, costs: Costs, lead: float = 0.0) -> Forecast:
    """Replay a program of any level. What starts ahead of it (`NodeInfo.ahead`) has `lead` seconds before the first
    node.

    Raises `PlanError` where the hardware has no link for a mesh dimension.
    """
    replay = _Replay(program, costs, lead)
    for node in program.graph.nodes:
        replay.node(node)
    time = replay.timeline
    memory = tuple(memory_of(program, costs.fused))
    return Forecast(
        program.name,
        time.end(),
        time.busy(),
        tuple(replay.stalls),
        memory,
        dict(replay.moved),
        tuple(time.spans),
        tuple(replay.clocks),
    )


class _Replay:
    """The replay of a program on a timeline, node by node."""

    def __init__(self, program: Program, costs: Costs, lead: float) -> None:
        self.program, self.costs, self.lead = program, costs, lead
        self.compute = costs.compute(program)
        self.timeline = Timeline(lead)
        self.done: dict[fx.Node, float] = {}  # when each transfer that was started is done
        self.begun: dict[fx.Node, float] = {}  # when the value of each move was ready to be moved
        self.stalls: list[Stall] = []
        self.moved: Counter[str] = Counter()
        self.clocks: list[float] = []

    def node(self, node: fx.Node) -> None:
        if collectives.is_start(node) and node not in self.done:  # (else it went with its bucket)
            self._collective(node)
        elif transfers_to_host.is_start(node):
            self._move(node)
        elif collectives.is_wait(node) or transfers_to_host.is_wait(node):
            self._wait(node)
        elif node in self.compute and on_host(node):
            self.timeline.run(HOST, self.compute[node], node=node.name)
        elif node in self.compute:
            # (the host starts it)
            self.timeline.run(COMPUTE, self.compute[node], self.timeline.now(HOST), node=node.name)
        self.clocks.append(max(self.timeline.now(), self.timeline.now(HOST)))

    def _collective(self, node: fx.Node) -> None:
        starts = bucket_of(node)
        group = str(info(node).mesh_dim)
        seconds = self.costs.transfer(starts, ranks_in(group, self.program.mesh))
        clock = self.timeline.run(COMPUTE, self.costs.work(starts), node=node.name)
        earliest = clock - self.lead if info(node).ahead else clock
        lane = f"link:{self.costs.hardware.link_name(group)}"
        self.done.update(dict.fromkeys(starts, self.timeline.run(LINK, seconds, earliest, node.name, lane)))

    def _move(self, node: fx.Node) -> None:
        lane, moved = lane_of(node), transfers_to_host.moved_value(node)
        way = f" {'read' if node.target is transfers_to_host.FETCH else 'write'}" if lane == "nvme" else ""
        self.moved[lane + way] += size_of(moved)
        host = self.timeline.now(HOST)
        self.begun[node] = host if on_host(moved) else max(self.timeline.now(), host)
        self.done[node] = self.timeline.run(lane, self.costs.move(node), self.begun[node], node.name)

    def _wait(self, node: fx.Node) -> None:
        start, stream = node.all_input_nodes[0], HOST if on_host(node) else COMPUTE
        now, done = self.timeline.now(stream), self.done.get(start, 0.0)
        if done > now:
            waited = done - max(now, self.begun.get(start, 0.0))
            self.stalls.append(Stall(node.name, info(start).role, waited, stream))
            self.timeline.wait(done, stream)


def lane_of(start: fx.Node) -> str:
    """Return the lane that a move occupies: "nvme" (reads and writes alike), "h2d" or "d2h"."""
    if tier_of(start) == "nvme":
        return "nvme"
    return "h2d" if start.target is transfers_to_host.FETCH and not on_host(start) else "d2h"


def bucket_of(start: fx.Node) -> list[fx.Node]:
    """Return the starts of this one's bucket from it on: they are one transfer."""
    starts = [start]
    name = info(start).bucket
    while name is not None and collectives.is_start(starts[-1].next) and info(starts[-1].next).bucket == name:
        starts.append(starts[-1].next)
    return starts

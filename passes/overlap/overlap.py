"""Decides when each transfer starts and when it is waited for: a list scheduler over a simulated step.

*Contract.* Computation keeps its order. On exit each gather starts as early as it has to, if the link, the cap on gathered
bytes and the step's peak allow, and is waited for just before its first reader; each reduction starts once its gradient is
there and the link has nothing more urgent, and is waited for as late as the cap on waiting gradients and the step's peak
allow. The level is *scheduled*: order has meaning from here on.

    for each operator, in order, at the simulated time t:
        start what it needs and what has not started; wait for it (the clock stands still until it has arrived)
        while the link would run dry before the operator ends:
            start the next gather, if it is urgent, if there is room for it until it is used, and if it is due before a
            reduction would be done with the link, else the oldest reduction that is ready
        run it; what it read for the last time is free again; gradients that it made are ready
    start and await the reductions that are left

A gather is urgent if, should it start any later, it or a transfer after it would be late: so a link that has time to spare
takes no memory. Room is what the step has below its peak without any prefetch (`zgraph/passes/analysis/memory_slack.py`), and a little more.

The queue on the link is kept just long enough to bridge the operator that runs: what is urgent never stands behind a long
queue, and all ranks decide from the same table of costs. List scheduling by deadlines is Graham's (1969, "Bounds on
Multiprocessing Timing Anomalies"); prefetch under a bound on gathered bytes is DeepSpeed's (stage3_max_live_parameters),
bounded here at every position. Since forward and backward are one graph, the backward's first gathers start in the forward;
the forward's first ones stand before it, marked `ahead`: the update of the step before starts them, or a pipeline's stage before
it waits for what it receives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from statistics import median_high
from typing import Literal

from torch import fx

from zgraph.errors import PlanError
from zgraph.passes.analysis.costs import CPU, Costs, size_of
from zgraph.passes.analysis.memory import memory_of
from zgraph.passes.analysis.memory_slack import Room
from zgraph.passes.analysis.parameter_collectives import Transfer, gathers_of, largest_layer, reductions_of
from zgraph.passes.contract import graph_pass
from zgraph.program import collectives
from zgraph.program.aliases import is_view
from zgraph.program.node import Phase, Role, info, set_info
from zgraph.program.program import Fact, InputRole, Level, Program
from zgraph.program.remark import Remark
from zgraph.units import shown_bytes

SAFETY_FACTOR = 1.5  # a gather is as urgent as if all transfers took so many times their (simulated) time
SLACK = 1.25  # what is wanted on the link while an operator runs, in its own (simulated) time: costs are estimates
MARGIN = 5e-4  # seconds on top of it: how late a rank may start its part
UPDATE_TRAFFIC = 4  # how often an update reads and writes the bytes of all shards, at least
NO_BOUND = 2**60  # bytes
NOTEWORTHY = 1e-6  # seconds: stalls below it are no remark


@dataclass(frozen=True)
class OverlapOptions:
    """See `zgraph.plan.communication.Prefetch` for the bounds (bytes; None: as said there).

    `room_bytes` are those beyond what is needed at once, where `max_bytes` says nothing (None: two of the largest layers). What
    is gathered early raises the step's peak by at most `spare_bytes` (None: those of the largest layer, and of a bucket of middle
    size at least; no bound if there is `max_bytes`). With `ahead` false every transfer is waited for where it starts. The first
    gathers start before the forward if there is something `beside`: the "update" of the step before, or the wait for what a stage "receives".
    `costs` are what the simulated step is made of.
    """

    max_bytes: int | None = None
    room_bytes: int | None = None
    spare_bytes: int | None = None
    ahead_bytes: int | None = None
    reduce_bytes: int | None = None
    ahead: bool = True
    beside: Literal["update", "receives"] | None = None
    costs: Costs = field(default_factory=lambda: Costs(CPU))


@graph_pass(
    "overlap",
    "transfers start and are awaited where they cost least time, within a bound on memory",
    options=OverlapOptions,
    requires=(Fact.SHARDED, Fact.REDUCED),
    provides=(Fact.SCHEDULED,),
    conflicts=(Fact.RELEASED,),
    level=Level.SCHEDULED,
)
def overlap(program: Program, options: OverlapOptions) -> dict[str, int]:
    scheduler = _Scheduler(program, options)
    scheduler.run()
    scheduler.apply()
    program.remarks += scheduler.remarks
    return scheduler.counts


@dataclass(eq=False)
class _Bucket:
    """Transfers that start together."""

    members: list[Transfer]
    seconds: float
    work: float
    held: int  # bytes, from the start on
    counted: bool  # does the cap on gathered bytes count it? (not what outlives the program)
    first: int = -1  # position of the first reader (gathers), of the source (reductions), among the operators
    started: bool = False
    awaited: bool = False
    done: float = 0.0
    blocked: tuple[str, str] | None = None  # why it could not start before then, and what would let it


class _Scheduler:
    def __init__(self, program: Program, options: OverlapOptions) -> None:
        self.program = program
        self.options = options
        costs = options.costs
        gathers, reductions = gathers_of(program), reductions_of(program)
        moved = {n for t in (*gathers, *reductions) for n in t.nodes}
        self._sink_views(gathers)
        nodes = [n for n in program.graph.nodes if n.op not in ("placeholder", "output") and n not in moved]
        self.operators = nodes
        self.at = {n: i for i, n in enumerate(nodes)}
        compute = costs.compute(program)
        self.cost = [compute.get(n, 0.0) for n in nodes]
        self.before = [0.0]  # the clock at each operator, were there no communication
        for seconds in self.cost:
            self.before.append(self.before[-1] + seconds)
        self.gathers = [self._bucket(b) for b in _buckets(gathers)]
        self.reductions = [self._bucket(b) for b in _buckets(reductions)]
        results = {n for _, n in program.output_items()}
        self.last: dict[Transfer, int] = {}
        for bucket in self.gathers:
            ends = []
            for member in bucket.members:
                readers = [r for r in member.readers() if r in self.at]
                leaves = any(alias in results for alias in _all_views(member.last)) or member.last in results
                self.last[member] = len(nodes) if leaves else max((self.at[r] for r in readers), default=0)
                ends.append(leaves)
                aliases = [n for n in _all_views(member.last) if n in self.at]
                first = min((self.at[n] for n in [*readers, *aliases]), default=len(nodes) if leaves else 0)
                bucket.first = first if bucket.first < 0 else min(bucket.first, first)
            bucket.counted = not all(ends)
        self.gathers.sort(key=lambda b: b.first)
        self.place = {b: i for i, b in enumerate(self.gathers)}
        arrives = {n: b.first for b in self.gathers for m in b.members for n in m.nodes}
        waits = {t.wait for t in reductions}
        self.chained: dict[fx.Node, _Bucket] = {  # by the wait that a second reduction starts from
            m.source: b for b in self.reductions for m in b.members if m.source in waits and m.source is not None
        }
        # A reduction belongs to the backward, also of what the forward has made or of what comes into the backward.
        turn = max((i for i, n in enumerate(nodes) if info(n).phase is Phase.FORWARD), default=-1)
        self.made: dict[int, int] = {}  # bytes of gradients to scatter, by the position at which they are there
        for bucket in self.reductions:
            for member in bucket.members:
                source = member.source
                known = source is not None and source not in waits
                made = max(turn, self.at.get(source, arrives.get(source, -1))) if known else turn  # type: ignore[arg-type]
                bucket.first = max(bucket.first, made)
                self.made[made] = self.made.get(made, 0) + member.bytes
        self.spare = self._spare()
        self.room = self._room()
        self.latest, self.wanted = self._latest_starts()
        self.scattered = 0.0  # seconds of the reductions that have started
        self.order: list[fx.Node] = []
        self.phases: dict[fx.Node, Phase] = {}
        self.remarks: list[Remark] = []
        self.clock = self.free = 0.0
        self.live = self.ahead = self.waiting = self.peak = 0
        self.early = 0
        self.queue: list[_Bucket] = []  # reductions in flight, oldest first

    def _bucket(self, members: list[Transfer]) -> _Bucket:
        costs = self.options.costs
        starts = [m.start for m in members]
        ranks = self.program.mesh[collectives.group_of(starts[0])]
        return _Bucket(members, costs.transfer(starts, ranks), costs.work(starts), sum(m.bytes for m in members), True)

    def _sink_views(self, gathers: list[Transfer]) -> None:
        """Views of a gathered parameter stand before their first reader: a view is no reason to gather."""
        for gather in gathers:
            for view in reversed([n for n in _all_views(gather.last) if n not in gather.nodes]):
                users = [u for u in view.users if u.op != "output"]
                if users and info(min(users)).phase is info(view).phase:
                    min(users).prepend(view)

    def _spare(self) -> int:
        options = self.options
        if options.spare_bytes is not None:
            return options.spare_bytes
        if options.max_bytes is not None:
            return NO_BOUND
        sizes = [bucket.held for bucket in self.gathers if bucket.counted]
        return max(largest_layer(self.program), int(median_high(sizes)) if sizes else 0)

    def _room(self) -> Room:
        memory = dict(zip(self.program.graph.nodes, memory_of(self.program, self.options.costs.fused), strict=True))
        others = [sum(memory[n].values()) - memory[n].get("gathered", 0) for n in self.operators]
        needed = [(b.first, self.last[m], m.bytes) for b in self.gathers if b.counted for m in b.members]
        return Room(others, needed, self.spare)

    def _latest_starts(self) -> tuple[list[float], list[float]]:
        """For each gather: the last moment, in compute time, at which it may start if neither it nor what comes after it is to
        be late (gathers for their readers, all transfers for the end), had nothing been on the link before; and the seconds
        that the gathers before it take of the link."""
        ready = sorted((b.first, b.seconds) for b in self.reductions)
        latest: list[float] = []
        wanted = [0.0]
        scattered, at = 0.0, 0
        for bucket in self.gathers:
            while at < len(ready) and ready[at][0] < bucket.first:
                scattered += ready[at][1]
                at += 1
            wanted.append(wanted[-1] + bucket.seconds)
            latest.append(self.before[bucket.first] - SAFETY_FACTOR * (wanted[-1] + scattered) - MARGIN)
        everything = wanted[-1] + sum(b.seconds for b in self.reductions)
        least = self.before[-1] - SAFETY_FACTOR * everything - MARGIN
        for i in range(len(latest) - 1, -1, -1):
            least = latest[i] = min(latest[i], least)
        return latest, wanted

    # -- bounds ---------------------------------------------------------------------------------------------------------
    def _needed(self) -> tuple[int, list[_Bucket]]:
        """The gathered bytes that the program needs at once if each bucket starts where it is needed, and which they are."""
        worst, which = 0, []
        for at in sorted({b.first for b in self.gathers}):
            alive = [
                b for b in self.gathers if b.counted and b.first <= at and max(self.last[m] for m in b.members) >= at
            ]
            size = sum(m.bytes for b in alive for m in b.members if self.last[m] >= at)
            if size > worst:
                worst, which = size, alive
        return worst, which

    def _bounds(self) -> tuple[int, int, int]:
        """The caps on gathered bytes, on those that wait for their use, and on gradients that wait to be scattered."""
        options = self.options
        layer = largest_layer(self.program)
        needed, which = self._needed()
        room = 2 * layer if options.room_bytes is None else options.room_bytes
        cap = needed + room if options.max_bytes is None else options.max_bytes
        if needed > cap:
            names = [m.name for b in which for m in b.members]
            raise PlanError(
                f"gathered parameters can't be held within {shown_bytes(cap)}",
                where="prefetch.max_bytes",
                why=f"{self.program.name} needs {shown_bytes(needed)} at once: {', '.join(names[:6])}{' …' if len(names) > 6 else ''}",
                hint=f"the smallest that works is {needed} bytes, with no prefetch at all; smaller buckets may need less",
            )
        ahead = cap if options.ahead_bytes is None else options.ahead_bytes
        waiting = 2 * (layer or max((b.held for b in self.reductions), default=0))
        return cap, ahead, waiting if options.reduce_bytes is None else options.reduce_bytes

    # -- the step, simulated ---------------------------------------------------------------------------------------------
    def run(self) -> None:
        self.cap, self.cap_ahead, self.cap_reduce = self._bounds()
        upcoming = list(self.gathers)  # in the order of their first use
        unchained = [b for b in self.reductions if not any(m.source in self.chained for m in b.members)]
        ready = [b for b in unchained if b.first < 0]
        self.waiting = self.made.get(-1, 0)
        by_first: dict[int, list[_Bucket]] = {}
        for bucket in self.gathers:
            by_first.setdefault(bucket.first, []).append(bucket)
        by_source: dict[int, list[_Bucket]] = {}
        for bucket in unchained:
            if bucket.first >= 0:
                by_source.setdefault(bucket.first, []).append(bucket)
        ends: dict[int, list[Transfer]] = {}
        for member, last in self.last.items():
            ends.setdefault(last, []).append(member)
        counted = {m for b in self.gathers if b.counted for m in b.members}
        if self.options.beside is not None and self.options.ahead:
            self._begin(upcoming)
        for i, node in enumerate(self.operators):
            needed = by_first.get(i, [])
            for bucket in needed:
                if not bucket.started:
                    self._start(bucket, node)
                    upcoming.remove(bucket)
            self._fill(i, upcoming, ready, max((b.done for b in needed), default=0.0))
            for bucket in needed:
                self._await_gather(bucket, node)
            if needed:
                self._fill(i, upcoming, ready)
            self.order.append(node)
            self.clock += self.cost[i]
            self.live -= sum(m.bytes for m in ends.get(i, []) if m in counted)
            ready += by_source.get(i, [])
            self.waiting += self.made.get(i, 0)
            while ready and not self.options.ahead:
                self._start(ready.pop(0), node)
                self._await_oldest(ready)
            while self._too_many_wait(i + 1) and (self.queue or ready):
                if not self.queue:
                    self._start(ready.pop(0), node)
                if i + 1 < len(self.operators):
                    self._fill(i + 1, upcoming, ready, self.queue[0].done)
                self._await_oldest(ready)
        for bucket in upcoming:  # read by nothing but the program's results
            self._start(bucket, None)
            self._await_gather(bucket, None)
        ready += by_source.get(len(self.operators), [])
        while ready or self.queue:
            while ready:
                self._start(ready.pop(0), None)
            self._await_oldest(ready)

    def _begin(self, upcoming: list[_Bucket]) -> None:
        """Start the first gathers before the forward: as many as the link carries during the update, or as there is room for. (How long a
        stage waits for what it receives is not known here; it may be no time at all.)"""
        shards = sum(size_of(n) for n in self.program.input_nodes(InputRole.PARAMETER).values())
        waits = self.options.beside == "receives"
        update = 0.0 if waits else UPDATE_TRAFFIC * shards / self.options.costs.hardware.memory
        enough = inf if waits else SLACK * update + MARGIN
        room = min(self.cap, self.cap_ahead) if any(b.counted for b in upcoming) else 2 * largest_layer(self.program)
        seconds = held = 0.0
        while upcoming and seconds <= enough:
            bucket = upcoming[0]
            held += bucket.held
            if held > room or info(bucket.members[0].start).phase is not Phase.FORWARD:
                break
            if bucket.counted and not (self._urgent(bucket, 0) and self._fits(bucket, 0)):
                break
            upcoming.pop(0)
            for member in bucket.members:
                for node in (*member.before, member.start):
                    set_info(node, info(node).replace(ahead=True))
            self._start(bucket, None)
            seconds += bucket.seconds
        self.clock = 0.0
        self.free = max(0.0, seconds - update)
        for bucket in self.gathers:
            bucket.done = max(0.0, bucket.done - update)

    def _fill(self, i: int, upcoming: list[_Bucket], ready: list[_Bucket], begin: float = 0.0) -> None:
        """Start transfers until the link is busy for as long as operator `i`, which runs at `begin` or now, and the start of the next one
        will take."""
        if not self.options.ahead:
            return
        node = self.operators[i]
        enough = SLACK * self.cost[i] + MARGIN
        while self.free < max(self.clock, begin) + enough + max(
            (b.work for b in (*upcoming[:1], *ready[:1])), default=0.0
        ):
            gather = upcoming[0] if upcoming else None
            if gather is not None and not self._urgent(gather, i):
                gather = None
            if gather is not None and not self._fits(gather, i):
                gather = None
            if gather is not None and ready:
                due = self.clock + self.before[max(gather.first, i)] - self.before[i]
                if due - max(self.free, self.clock) > gather.seconds * SLACK + ready[0].seconds + MARGIN:
                    gather = None
            if gather is not None:
                self._start(upcoming.pop(0), node)
            elif ready:
                self._start(ready.pop(0), node)
            else:
                return

    def _urgent(self, gather: _Bucket, i: int) -> bool:
        """Would it, or a later one, be late if it did not start before operator `i` ends?"""
        at = self.place[gather]
        latest = self.latest[at] - self.before[i] + SAFETY_FACTOR * (self.wanted[at] + self.scattered)
        return latest <= max(self.free - self.clock, 0.0) + self.cost[i]

    def _fits(self, gather: _Bucket, i: int) -> bool:
        if not gather.counted:
            return True
        live, ahead = self.live + gather.held, self.ahead + gather.held
        if live > self.cap:
            why, remedy = (
                f"gathered bytes would reach {shown_bytes(live)}, cap {shown_bytes(self.cap)}",
                f"prefetch.max_bytes={live}",
            )
        elif ahead > self.cap_ahead:
            why = f"gathered bytes that nothing has used would reach {shown_bytes(ahead)}, cap {shown_bytes(self.cap_ahead)}"
            remedy = f"prefetch.ahead_bytes={ahead}"
        elif (reached := self.room.reached(i, gather.first, gather.held + self.waiting)) > self.room.limit:
            why = f"the step's memory would reach {shown_bytes(reached)}, limit {shown_bytes(self.room.limit)}"
            remedy = f"prefetch.spare_bytes={reached - self.room.limit + self.spare}"
        else:
            return True
        if gather.blocked is None:
            gather.blocked = (f"not hoisted above {self.operators[i].name}: {why}", remedy)
        return False

    def _too_many_wait(self, i: int) -> bool:
        """Are there more gradients waiting before operator `i` than may, or (if nothing is said of it) than there is room for?"""
        if self.waiting > self.cap_reduce:
            return True
        return self.options.reduce_bytes is None and self.room.reached(i, i + 1, self.waiting) > self.room.limit

    def _start(self, bucket: _Bucket, node: fx.Node | None) -> None:
        """Start a bucket before the operator `node`; None: before the first one, or at the end."""
        for member in bucket.members:
            self.order += member.before
        self.order += [member.start for member in bucket.members]
        bucket.started = True
        self.clock += bucket.work
        self.free = bucket.done = max(self.clock, self.free) + bucket.seconds
        if info(bucket.members[0].start).role is Role.REDUCE:
            self.queue.append(bucket)
            self.scattered += bucket.seconds
            return
        if node is not None and info(node).phase is Phase.FORWARD:
            moved = [n for m in bucket.members for n in (*m.before, m.start)]
            self.phases.update((n, Phase.FORWARD) for n in moved if info(n).phase is Phase.BACKWARD)
        if bucket.counted:
            self.live += bucket.held
            self.ahead += bucket.held
            self.peak = max(self.peak, self.live)
            self.room.hold(0 if node is None else self.at[node], bucket.first, bucket.held)
        self.early += node is None or bucket.first != self.at[node]

    def _await_gather(self, bucket: _Bucket, node: fx.Node | None) -> None:
        for member in bucket.members:
            self.order += [member.wait, *member.after]
        if bucket.counted:
            self.ahead -= bucket.held
        late = bucket.done - self.clock
        if late > NOTEWORTHY:
            self._remark_gather(bucket, node, late)
        self.clock = max(self.clock, bucket.done)
        bucket.awaited = True

    def _await_oldest(self, ready: list[_Bucket]) -> None:
        """Wait for the reduction that started first; a second one over another dimension starts where it ends."""
        if not self.queue:
            return
        bucket = self.queue.pop(0)
        follow: list[_Bucket] = []
        for member in bucket.members:
            self.order += [member.wait, *member.after]
            following = self.chained.get(member.wait)
            if following is not None and following not in follow:
                follow.append(following)
        bucket.awaited = True
        late = bucket.done - self.clock
        if late > NOTEWORTHY:
            self._remark_reduction(bucket, late)
        self.clock = max(self.clock, bucket.done)
        self.waiting -= bucket.held
        for following in follow:
            if all(m.source is None or m.source in self._placed() for m in following.members):
                ready.insert(0, following)

    def _placed(self) -> set[fx.Node]:
        return {m.wait for b in self.reductions if b.awaited for m in b.members}

    # -- the result ------------------------------------------------------------------------------------------------------
    def apply(self) -> None:
        """Put the graph's nodes into the decided order."""
        program = self.program
        output = program.output_node()
        assert len(self.order) == len(set(self.order)) == len(program.graph.nodes) - len(program.inputs) - 1
        for node in self.order:
            output.prepend(node)
        for node, phase in self.phases.items():
            set_info(node, info(node).replace(phase=phase))

    @property
    def counts(self) -> dict[str, int]:
        crossing = sum(info(n).role is Role.GATHER for n in self.phases)
        return {
            "early": self.early,
            "across_the_turn": crossing,
            "gathered_bytes": self.peak,
            "cap_bytes": self.cap,
            "missed": len(self.remarks),
        }

    def _remark_gather(self, bucket: _Bucket, node: fx.Node | None, late: float) -> None:
        first = bucket.members[0]
        module = info(node).module or "(root)" if node is not None else "the end"
        if not self.options.ahead:
            why, remedy = "prefetch is off", "prefetch.enabled=True"
        elif bucket.blocked is not None:
            why, remedy = bucket.blocked
        else:
            why = "the link is busy until then"
            remedy = "a faster link, or a memory_budget that lets weights be kept"
        what = f"gather of {first.name} is waited for at {module}"
        self.remarks.append(Remark("overlap", first.start.name, what, why, late, remedy))

    def _remark_reduction(self, bucket: _Bucket, late: float) -> None:
        first = bucket.members[0]
        if not self.options.ahead:
            why, remedy = "prefetch is off", "prefetch.enabled=True"
        elif self.waiting > self.cap_reduce:
            why = f"gradients that wait to be scattered would reach {shown_bytes(self.waiting)}, cap {shown_bytes(self.cap_reduce)}"
            remedy = f"prefetch.reduce_bytes={self.waiting}"
        else:
            why = "there is nothing left to compute beside it"
            remedy = "a faster link, or more micro-batches"
        what = f"reduction of {first.name}'s gradient is waited for"
        self.remarks.append(Remark("overlap", first.start.name, what, why, late, remedy))


def _buckets(transfers: list[Transfer]) -> list[list[Transfer]]:
    """Transfers by bucket; one without a bucket is by itself."""
    found: dict[object, list[Transfer]] = {}
    for transfer in transfers:
        found.setdefault(info(transfer.start).bucket or transfer, []).append(transfer)
    return list(found.values())


def _all_views(node: fx.Node) -> list[fx.Node]:
    """The views of a value, and theirs, in graph order; not the value itself."""
    found: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if is_view(user) and user not in found:
                found[user] = None
                stack.append(user)
    return sorted(found)

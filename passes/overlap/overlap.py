"""Decides when each transfer starts and when it is waited for: a list scheduler over a simulated step.

*Contract.* Computation keeps its order. On exit each gather starts as early as it has to, if the link, the cap on
gathered bytes and the step's peak allow, and is waited for just before its first reader; each reduction starts once its
gradient is computed and the link has nothing more urgent, and is waited for as late as the cap on waiting gradients and
the step's peak allow. The level is *scheduled*: order has meaning from here on.

    for each operator, in order, at the simulated time t:
        start what it needs and what has not started; wait for it (the clock stands still until it has arrived)
        while the link would run dry before the operator ends:
            start the next gather, if it is urgent, if there is memory for it until it is used, and if it is due before a
            reduction would be done with the link, else the oldest reduction that is ready
        run it; free what it read for the last time; the gradients that it made are ready
    start and await the reductions that are left

A gather is urgent if, should it start any later, it or a transfer after it would be late: so a link that has time to
spare takes no memory. Gathers may use the memory that the step has below its peak without any prefetch
(`zgraph/passes/analysis/memory_slack.py`), and a little more.

Costs are estimates, so this is done for links of several speeds, and the schedule that would lose least is taken
(`zgraph/passes/overlap/robust_schedule.py`).

The queue on the link is kept just long enough to bridge the operator that runs: urgent transfers never wait behind a
long queue, and all ranks decide from the same table of costs. List scheduling by deadlines is Graham's (1969, "Bounds
on Multiprocessing Timing Anomalies"); prefetch under a bound on gathered bytes is DeepSpeed's
(stage3_max_live_parameters), bounded here at every position. Since forward and backward are one graph, the backward's
first gathers start in the forward; the forward's first ones come before it, marked `ahead`: the update of the step
before starts them, or they start before a pipeline's stage waits for what it receives.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from torch import fx

from zgraph.passes.analysis.costs import CPU, Costs, size_of
from zgraph.passes.analysis.parameter_collectives import largest_layer
from zgraph.passes.analysis.timeline import COMPUTE, LINK, Timeline
from zgraph.passes.contract import graph_pass
from zgraph.passes.overlap.follow_order import FollowedOrder, Start, follow_order
from zgraph.passes.overlap.memory_caps import BoundedMemory, Bounds
from zgraph.passes.overlap.robust_schedule import BETWEEN, PRICE, SPEEDS, CandidateSchedule, Event, least_regret
from zgraph.passes.overlap.scheduling_problem import Bucket, SchedulingProblem
from zgraph.program.node import Phase, Role, info, set_info
from zgraph.program.program import Fact, InputRole, Level, Program
from zgraph.program.remark import Remark
from zgraph.units import shown_bytes

SAFETY_FACTOR = 1.5  # a gather is as urgent as if all transfers took this many times their (simulated) time
SLACK = 1.25  # queued transfers while an operator runs, as a multiple of its (simulated) time: costs are estimates
MARGIN = 5e-4  # seconds on top of it: how late a rank may start its part of a collective
UPDATE_TRAFFIC = 4  # how often an update reads and writes the bytes of all shards, at least
NOTEWORTHY = 1e-6  # seconds: stalls below it are no remark


@dataclass(frozen=True)
class OverlapOptions:
    """Options of `overlap`; see `zgraph.plan.communication.Prefetch` for the bounds (bytes; None: the default there)."""

    max_bytes: int | None = None  # the most gathered bytes at any time
    # gathered bytes beyond what is needed at once, without `max_bytes`; None: two of the largest layers
    room_bytes: int | None = None
    # bytes by which early gathers may raise the step's peak; None: those of the largest layer, and of a bucket of median
    # size at least; no bound if there is `max_bytes`
    spare_bytes: int | None = None
    ahead_bytes: int | None = None  # the most gathered bytes that nothing has used yet
    reduce_bytes: int | None = None  # the most bytes of gradients that wait to be scattered
    ahead: bool = True  # false: every transfer is waited for where it starts
    # what the first gathers run beside, before the forward: the "update" of the step before, or a stage's wait for what
    # it "receives"; None: none start before the forward
    beside: Literal["update", "receives"] | None = None
    costs: Costs = field(default_factory=lambda: Costs(CPU))  # the costs of the simulated step
    # starts in the order to follow where the program can (`zgraph.passes.overlap.follow_order`)
    order: tuple[Start, ...] = ()


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
    step = SchedulingProblem(program, options.costs)
    bounds = Bounds(
        options.max_bytes, options.room_bytes, options.spare_bytes, options.ahead_bytes, options.reduce_bytes
    )
    if options.order and (follower := _follow(step, bounds, options)) is not None:
        follower.apply()
        return follower.counts
    schedulers: dict[float, _Scheduler] = {}  # by the speed of links that each schedule is made for
    for speeds in (SPEEDS, BETWEEN) if options.ahead else (SPEEDS[:1],):
        for speed in speeds:
            mine = step.over(speed)
            schedulers[speed] = _Scheduler(mine, BoundedMemory(mine, bounds), options)
            schedulers[speed].run()
        taken, regret = least_regret([s.played(speed) for speed, s in schedulers.items()])
        if regret <= PRICE:
            break
    scheduler = list(schedulers.values())[taken]
    scheduler.apply()
    program.remarks += scheduler.remarks
    return scheduler.counts


def _follow(step: SchedulingProblem, bounds: Bounds, options: OverlapOptions) -> _Follower | None:
    """Return the schedule in the requested order; None if the program can't follow it."""
    step = step.over(1.0)
    known = follow_order(step, options.order)
    if known is None:
        return None
    follower = _Follower(step, BoundedMemory(step, bounds), options, known)
    try:
        follower.run()
    except _OutOfOrderError:
        return None
    return follower


class _Scheduler:
    """A list scheduler of one step's transfers.

    `step` is what there is to schedule, `timeline` the simulated time, `memory` the bytes in use and the bounds on
    them.
    """

    def __init__(self, step: SchedulingProblem, memory: BoundedMemory, options: OverlapOptions) -> None:
        self.step, self.memory, self.options = step, memory, options
        self.timeline = Timeline()
        self.place = {b: i for i, b in enumerate(step.gathers)}
        self.latest, self.wanted = self._latest_starts()
        self.upcoming = list(step.gathers)  # in the order of their first use
        self.ready: list[Bucket] = []  # reductions that may start
        self.queue: list[Bucket] = []  # reductions in flight, oldest first
        self.scattered = 0.0  # seconds of the reductions that have started
        self.order: list[fx.Node] = []
        self.events: list[Event] = []  # what happens, in the decided order
        self.lead = 0.0  # seconds that the link has before the first operator
        self.begun: list[fx.Node] = []  # the nodes that run ahead of the program
        self.phases: dict[fx.Node, Phase] = {}
        self.remarks: list[Remark] = []
        self.early = 0

    def _latest_starts(self) -> tuple[list[float], list[float]]:
        """Return, for each gather, the latest moment to start it, and the seconds that the gathers before it take of
        the link.

        The moment is in compute time: the last at which neither the gather nor a transfer after it would be late
        (gathers for their readers, all transfers for the end), if the link had been idle before.
        """
        step = self.step
        ready = sorted((b.first, b.seconds) for b in step.reductions)
        latest: list[float] = []
        wanted = [0.0]
        scattered, at = 0.0, 0
        for bucket in step.gathers:
            while at < len(ready) and ready[at][0] < bucket.first:
                scattered += ready[at][1]
                at += 1
            wanted.append(wanted[-1] + bucket.seconds)
            latest.append(step.before[bucket.first] - SAFETY_FACTOR * (wanted[-1] + scattered) - MARGIN)
        everything = wanted[-1] + sum(b.seconds for b in step.reductions)
        least = step.before[-1] - SAFETY_FACTOR * everything - MARGIN
        for i in range(len(latest) - 1, -1, -1):
            least = latest[i] = min(latest[i], least)
        return latest, wanted

    # -- the step, simulated ---------------------------------------------------------------------------------------------
    def run(self) -> None:
        step, memory = self.step, self.memory
        unchained = [b for b in step.reductions if not any(m.source in step.chained for m in b.members)]
        self.ready = [b for b in unchained if b.first < 0]
        memory.waiting = step.made.get(-1, 0)
        by_first: dict[int, list[Bucket]] = defaultdict(list)
        for bucket in step.gathers:
            by_first[bucket.first].append(bucket)
        by_source: dict[int, list[Bucket]] = defaultdict(list)
        for bucket in unchained:
            if bucket.first >= 0:
                by_source[bucket.first].append(bucket)
        ends: dict[int, int] = defaultdict(int)  # gathered bytes that are freed after each operator
        for bucket in step.gathers:
            for member in bucket.members if bucket.counted else ():
                ends[step.last[member]] += member.bytes
        if self.options.beside is not None and self.options.ahead:
            self._begin()
        for i in range(len(step.operators)):
            self._operator(i, by_first[i])
            memory.live -= ends[i]
            self.ready += by_source[i]
            memory.waiting += step.made.get(i, 0)
            self._reduce_behind(i)
        self.ready += by_source[len(step.operators)]
        self._finish()

    def _finish(self) -> None:
        """Start and await the transfers that are left after the last operator."""
        for bucket in self.upcoming:  # (only outputs of the program read these)
            self._start(bucket, None)
            self._await_gather(bucket, None)
        while self.ready or self.queue:
            while self.ready:
                self._start(self.ready.pop(0), None)
            self._await_oldest()

    def _operator(self, i: int, needed: list[Bucket]) -> None:
        """Schedule one operator: start the gathers it needs and those the link has time for, wait for those it needs,
        run it.
        """
        node = self.step.operators[i]
        self._start_needed(i, needed)
        self._fill(i, max((b.done for b in needed), default=0.0))
        for bucket in needed:
            self._await_gather(bucket, node)
        if needed:
            self._fill(i)
        self.order.append(node)
        self.timeline.run(COMPUTE, self.step.cost[i])
        self.events.append(Event(self.step.cost[i]))

    def _start_needed(self, i: int, needed: list[Bucket]) -> None:
        for bucket in needed:
            if not bucket.started:
                self._start(bucket, self.step.operators[i])
                self.upcoming.remove(bucket)

    def _reduce_behind(self, i: int) -> None:
        """Start and await reductions after an operator, if they may not wait longer."""
        node = self.step.operators[i]
        while self.ready and not self.options.ahead:
            self._start(self.ready.pop(0), node)
            self._await_oldest()
        while self.memory.too_many_wait(i + 1) and (self.queue or self.ready):
            if not self.queue:
                self._start(self.ready.pop(0), node)
            if i + 1 < len(self.step.operators):
                self._fill(i + 1, self.queue[0].done)
            self._await_oldest()

    def _begin(self) -> None:
        """Start the first gathers before the forward: as many as the link carries during the update, or as there is
        memory for.

        (How long a stage waits for what it receives is not known here; it may be no time at all.)
        """
        program, upcoming, memory = self.step.program, self.upcoming, self.memory
        shards = sum(size_of(n) for n in program.input_nodes(InputRole.PARAMETER).values())
        waits = self.options.beside == "receives"
        update = 0.0 if waits else UPDATE_TRAFFIC * shards / self.options.costs.hardware.memory
        enough = inf if waits else SLACK * update + MARGIN
        room = min(memory.cap, memory.cap_ahead) if any(b.counted for b in upcoming) else 2 * largest_layer(program)
        seconds = live_bytes = 0.0
        while upcoming and seconds <= enough:
            bucket = upcoming[0]
            live_bytes += bucket.held
            if live_bytes > room or info(bucket.members[0].start).phase is not Phase.FORWARD:
                break
            if bucket.counted and not (self._urgent(bucket, 0) and self._fits(bucket, 0)):
                break
            upcoming.pop(0)
            for member in bucket.members:
                self.begun += [*member.before, member.start]
            self._start(bucket, None, ahead=True)
            seconds += bucket.seconds
        self.lead = update
        self.timeline.set(COMPUTE, 0.0)
        self.timeline.set(LINK, max(0.0, seconds - update))
        for bucket in self.step.gathers:
            bucket.done = max(0.0, bucket.done - update)

    def _fill(self, i: int, begin: float = 0.0) -> None:
        """Start transfers until the link is busy for as long as operator `i`, which runs at `begin` or now, and the
        start of the next transfer will take.
        """
        if not self.options.ahead:
            return
        node = self.step.operators[i]
        enough = SLACK * self.step.cost[i] + MARGIN
        while self.timeline.now(LINK) < max(self.timeline.now(), begin) + enough + self._work_of_next():
            if self._gather_is_next(i):
                self._start(self.upcoming.pop(0), node)
            elif self.ready:
                self._start(self.ready.pop(0), node)
            else:
                return

    def _work_of_next(self) -> float:
        return max((b.work for b in (*self.upcoming[:1], *self.ready[:1])), default=0.0)

    def _gather_is_next(self, i: int) -> bool:
        """Return whether the next gather is urgent, fits in memory, and is due before a reduction would be done with
        the link.
        """
        gather = self.upcoming[0] if self.upcoming else None
        if gather is None or not self._urgent(gather, i) or not self._fits(gather, i):
            return False
        if not self.ready:
            return True
        now, before = self.timeline.now(), self.step.before
        due = now + before[max(gather.first, i)] - before[i]
        least = gather.seconds * SLACK + self.ready[0].seconds + MARGIN
        return due - max(self.timeline.now(LINK), now) <= least

    def _urgent(self, gather: Bucket, i: int) -> bool:
        """Return whether this gather, or a later one, would be late if it did not start before operator `i` ends."""
        at = self.place[gather]
        latest = self.latest[at] - self.step.before[i] + SAFETY_FACTOR * (self.wanted[at] + self.scattered)
        return latest <= max(self.timeline.now(LINK) - self.timeline.now(), 0.0) + self.step.cost[i]

    def _fits(self, gather: Bucket, i: int) -> bool:
        """Return whether the value that a gather starts from exists at operator `i`, and there is memory for it until
        it is used.
        """
        if i < gather.earliest:
            return False
        refusal = self.memory.refusal(gather, i)
        if refusal is not None and gather.blocked is None:
            why, remedy = refusal
            gather.blocked = (f"not hoisted above {self.step.operators[i].name}: {why}", remedy)
        return refusal is None

    def _start(self, bucket: Bucket, node: fx.Node | None, *, ahead: bool = False) -> None:
        """Start a bucket before the operator `node`; None: before the first one, `ahead` of the program, or at the end."""
        self.events.append(Event(bucket=bucket, ahead=ahead))
        for member in bucket.members:
            self.order += member.before
        self.order += [member.start for member in bucket.members]
        bucket.started = True
        bucket.done = self.timeline.run(LINK, bucket.seconds, self.timeline.run(COMPUTE, bucket.work))
        if info(bucket.members[0].start).role is Role.REDUCE:
            self.queue.append(bucket)
            self.scattered += bucket.seconds
            return
        if node is not None and info(node).phase is Phase.FORWARD:
            moved = [n for m in bucket.members for n in (*m.before, m.start)]
            self.phases.update((n, Phase.FORWARD) for n in moved if info(n).phase is Phase.BACKWARD)
        self.memory.start(bucket, 0 if node is None else self.step.at[node])
        self.early += node is None or bucket.first != self.step.at[node]

    def _await_gather(self, bucket: Bucket, node: fx.Node | None) -> None:
        for member in bucket.members:
            self.order += [member.wait, *member.after]
        self.events.append(Event(bucket=bucket, waits=True))
        self.memory.arrive(bucket)
        late = bucket.done - self.timeline.now()
        if late > NOTEWORTHY:
            self._remark_gather(bucket, node, late)
        self.timeline.wait(bucket.done)
        bucket.awaited = True

    def _await_oldest(self) -> None:
        """Wait for the reduction that started first; a second reduction over another dimension is ready then."""
        if not self.queue:
            return
        bucket = self.queue.pop(0)
        follow: list[Bucket] = []
        for member in bucket.members:
            self.order += [member.wait, *member.after]
            following = self.step.chained.get(member.last)
            if following is not None and following not in follow:
                follow.append(following)
        bucket.awaited = True
        self.events.append(Event(bucket=bucket, waits=True))
        late = bucket.done - self.timeline.now()
        if late > NOTEWORTHY:
            self._remark_reduction(bucket, late)
        self.timeline.wait(bucket.done)
        self.memory.waiting -= bucket.held
        awaited = {m.last for b in self.step.reductions if b.awaited for m in b.members}
        for following in follow:
            if all(m.source is None or m.source in awaited for m in following.members):
                self.ready.insert(0, following)

    def played(self, speed: float) -> CandidateSchedule:
        """Return the decided schedule, which was made for links of this speed."""
        return CandidateSchedule(self.events, speed, self.lead)

    # -- the result ------------------------------------------------------------------------------------------------------
    def apply(self) -> None:
        """Put the graph's nodes into the decided order."""
        program = self.step.program
        output = program.output_node()
        assert len(self.order) == len(set(self.order)) == len(program.graph.nodes) - len(program.inputs) - 1
        for node in self.order:
            output.prepend(node)
        for node, phase in self.phases.items():
            set_info(node, info(node).replace(phase=phase))
        for node in self.begun:
            set_info(node, info(node).replace(ahead=True))

    @property
    def counts(self) -> dict[str, int]:
        crossing = sum(info(n).role is Role.GATHER for n in self.phases)
        return {
            "early": self.early,
            "across_forward_backward": crossing,
            "gathered_bytes": self.memory.peak,
            "cap_bytes": self.memory.cap,
            "missed": len(self.remarks),
        }

    def _remark_gather(self, bucket: Bucket, node: fx.Node | None, late: float) -> None:
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

    def _remark_reduction(self, bucket: Bucket, late: float) -> None:
        first = bucket.members[0]
        if not self.options.ahead:
            why, remedy = "prefetch is off", "prefetch.enabled=True"
        elif self.memory.waiting > self.memory.cap_reduce:
            why = f"gradients that wait to be scattered would reach {shown_bytes(self.memory.waiting)}, cap {shown_bytes(self.memory.cap_reduce)}"
            remedy = f"prefetch.reduce_bytes={self.memory.waiting}"
        else:
            why = "there is nothing left to compute beside it"
            remedy = "a faster link, or more micro-batches"
        what = f"reduction of {first.name}'s gradient is waited for"
        self.remarks.append(Remark("overlap", first.start.name, what, why, late, remedy))


class _OutOfOrderError(Exception):
    """The next transfer in the order can't start yet, and a later one has to."""


class _Follower(_Scheduler):
    """A scheduler that starts transfers in the order of another program, as early as that order and the bounds let it.
    A transfer that an operator needs starts whatever the bounds.
    """

    def __init__(
        self, step: SchedulingProblem, memory: BoundedMemory, options: OverlapOptions, order: FollowedOrder
    ) -> None:
        super().__init__(step, memory, options)
        self.follows = order
        phases = [info(n).phase for n in step.operators]
        self.turn = max((i for i, phase in enumerate(phases) if phase is Phase.FORWARD), default=-1)

    def _start_next(self, node: fx.Node | None) -> Bucket:
        bucket, _ = self.follows.left.pop(0)
        if bucket in self.upcoming:
            self.upcoming.remove(bucket)
        else:
            while bucket not in self.ready and self.queue:
                self._await_oldest()  # (a second reduction starts where the first one ends)
            if bucket not in self.ready:
                raise _OutOfOrderError
            self.ready.remove(bucket)
        self._start(bucket, node)
        return bucket

    def _begin(self) -> None:
        while self.follows.begins_ahead():
            bucket = self.follows.left[0][0]
            for member in bucket.members:
                self.begun += [*member.before, member.start]
            self.upcoming.remove(bucket)
            self.follows.left.pop(0)
            self._start(bucket, None, ahead=True)

    def _start_needed(self, i: int, needed: list[Bucket]) -> None:
        node = self.step.operators[i]
        while not all(b.started for b in needed) or (i == self.turn and self.follows.begins_in(Phase.FORWARD)):
            self._start_next(node)

    def _fill(self, i: int, begin: float = 0.0) -> None:
        enough = SLACK * self.step.cost[i] + MARGIN
        while self.timeline.now(LINK) < max(self.timeline.now(), begin) + enough + self._work_of_next():
            bucket = self.follows.next
            early = i <= self.turn and not self.follows.begins_in(Phase.FORWARD)
            if bucket is None or early or not self.options.ahead:
                return
            if bucket not in self.ready and not (
                bucket in self.upcoming and self._urgent(bucket, i) and self._fits(bucket, i)
            ):
                return
            self._start_next(self.step.operators[i])

    def _reduce_behind(self, i: int) -> None:
        while self.follows.next in self.ready and not self.options.ahead:
            self._start_next(self.step.operators[i])
        while self.queue and (not self.options.ahead or self.memory.too_many_wait(i + 1)):
            self._await_oldest()

    def _finish(self) -> None:
        while self.follows.left:
            bucket = self._start_next(None)
            if bucket in self.step.gathers:
                self._await_gather(bucket, None)
        while self.queue:
            self._await_oldest()

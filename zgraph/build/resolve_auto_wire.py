"""Resolves `wire.auto` in a plan: chooses the formats in which a model's weights are gathered and its gradients reduced.

    (same, same) -> the best format of gathers beside it -> the best format of reductions beside that -> once more

The first program with a backward chooses, for all programs of the model: for each pair of formats that is tried, the
plan with this pair goes through all passes (and through the search for a memory budget), and the simulator says what a
step takes, all micro-batches and the update included. Of the formats that `wire.max_error` allows, and by which a step
is nearly as fast as by the fastest, the one with the smallest error is taken, and values stay as they are unless a step
gets faster by a tenth. Ranks choose alike, since they have agreed on the plan, the costs and the captured program.

[Note: doubt] What computing hides of a transfer costs nothing, and costs that nobody calibrated take computing for too
short: a Llama's step that was forecast to compute for 1.44 s took 1.86 (two CPUs that others share). Few bits would be
chosen for a link that is hidden anyway, and computing them is no gain then. So steps are compared as if all operators
took `DOUBT` times what costs say. Few bits that pay so pay all the more if costs are right.

[Note: gain] One program's forecasts, by costs that two processes measured on one machine minutes apart, were 0.667 and
0.807 s (a GPT in int8): computing few bits is much of what differs. Where they gain a few hundredths, they may as well
lose them: a Llama at 2 Gbit/s took 1.006 s in int8 and 0.965 as it was. A link that computing cannot hide gains more.

[Note: errors] The error of a format is the bound that `zgraph verify` holds each sent value to
(`zgraph.program.block_quantization.most_wrong`), of the largest element of a block: an element is wrong by at most this
part of it. What is rounded several times may be wrong by as much each time: the mean of an all-reduce is sent once
more, and gradients of a mesh with `replicate` and `dp` go through two collectives. "fp16" is not tried, since no bound
holds above 65,504, nor is "fp8", whose bytes are those of "int8" and whose bound is larger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from zgraph.build.build_context import BuildContext, own_order
from zgraph.build.memory_search import run_passes
from zgraph.build.pass_pipeline import PLAIN, MemoryDecision, PassFilter, Variant, build, runs_of
from zgraph.build.wire_formats import EXACT, WireFormats, WireStep
from zgraph.errors import PlanError
from zgraph.passes import History, PassManager
from zgraph.passes.analysis.costs import Costs, bytes_of, rounds
from zgraph.passes.analysis.simulator import simulate
from zgraph.plan.plan import Plan
from zgraph.plan.wire import Wire
from zgraph.program import collectives
from zgraph.program.block_quantization import most_wrong_part
from zgraph.program.groups import ranks_in
from zgraph.program.node import Role, info
from zgraph.program.program import OutputRole, Program, with_gradients_in

FORMATS = (EXACT, "bf16", "int8", "int4")  # by their errors
DOUBT = 1.5  # how many times as long as costs say operators take where steps are compared (see the note on doubt)
MIN_GAIN = 0.01  # the least part of a step that is worth a larger error among few bits
GAIN_OVER_EXACT = 0.1  # the least part of the exact step that few bits have to gain (see the note on gain)
ROUNDS = 2  # how often both formats are chosen, each beside the other

Pair = tuple[str, str]  # (format of gathers, format of reductions)


def with_formats(plan: Plan, pair: Pair) -> Plan:
    """Return the plan as it is written with these formats in place of `wire.auto`."""
    gather, reduce = pair
    of_gradients = {"rounding": "nearest", "error_feedback": False, "hierarchical": False} if reduce == EXACT else {}
    wire = {"auto": False, "max_error": None, "gather": gather, "reduce": reduce, **of_gradients}
    return plan.model_copy(update={"wire": plan.wire.model_copy(update=wire)})


def resolved(captured: Program, context: BuildContext, *, training: bool) -> BuildContext:
    """Return what a captured program, which is not changed, is built with: with formats in place of `wire.auto`.

    A program without a backward that is built before any with one sends weights as they are. Raises as `run_passes`.
    """
    if not context.plan.wire.auto:
        return context
    if context.wire.formats is None and training:
        context.wire.take(_Trials(captured, context).choose())
    formats = context.wire.formats
    pair = (EXACT, EXACT) if formats is None else (formats.chosen.gather, formats.chosen.reduce)
    return replace(context, plan=with_formats(context.plan, pair))


class _Trials:
    """The steps of one captured program with pairs of formats."""

    def __init__(self, captured: Program, context: BuildContext) -> None:
        self.captured = captured
        self.context = replace(context, pass_filter=PassFilter(verified=False), order=own_order)
        self.plan = context.plan
        assert self.plan.wire.max_error is not None
        self.max_error: float = self.plan.wire.max_error
        self.tried: dict[Pair, WireStep] = {}
        passes = build(with_formats(self.plan, (EXACT, EXACT)), costs=context.costs)
        self.cut = [p.name for p in passes].index("shard_parameters")
        self.start = captured.snapshot()  # (what comes before is the same for all formats)
        if self.plan.memory_budget is None:
            self.start.params = with_gradients_in(context.residents.at(None).homes, self.start.params)
            self.start = PassManager(passes[: self.cut], verify=False, snapshots=False).run(self.start).program

    def choose(self) -> WireFormats:
        """Return the formats. Raises `PlanError` where no step fits into the plan's memory budget."""
        block = self.plan.wire.block
        allowed = [f for f in FORMATS if f == EXACT or most_wrong_part(f, block) <= self.max_error]
        best = exact = self._step((EXACT, EXACT))
        for _ in range(ROUNDS):
            best = self._best([(f, best.reduce) for f in allowed])
            best = self._best([(best.gather, f) for f in allowed])
        if best.doubted > (1 - GAIN_OVER_EXACT) * exact.doubted:
            best = exact
        for beyond in FORMATS[len(allowed) :][-1:]:  # (the smallest, for the remark)
            self._step((beyond, best.reduce))
            self._step((best.gather, beyond))
        faster = [s for s in self.tried.values() if s.doubted < (1 - MIN_GAIN) * best.doubted]
        missed = [s for s in faster if s.error > self.max_error]
        return WireFormats(best, exact, min(missed, key=lambda s: s.doubted, default=None), self.max_error)

    def _best(self, pairs: Sequence[Pair]) -> WireStep:
        """Return the step with the smallest error of those that are nearly as fast as the fastest one allowed."""
        steps = [step for step in map(self._step, pairs) if step.error <= self.max_error]
        limit = (1 + MIN_GAIN) * min(step.doubted for step in steps)
        return min((s for s in steps if s.doubted <= limit), key=lambda s: (s.error, s.doubted))

    def _step(self, pair: Pair) -> WireStep:
        """Return the step with a pair of formats: it takes forever where it does not fit into the memory budget."""
        if self.plan.zero == 0 and pair[0] != EXACT:
            pair = EXACT, pair[1]  # (nothing is gathered)
        if pair not in self.tried:
            try:
                self.tried[pair] = self._forecast(replace(self.context, plan=with_formats(self.plan, pair)))
            except PlanError:
                if pair == (EXACT, EXACT):
                    raise
                self.tried[pair] = WireStep(*pair, error=1.0, sent=0, seconds=math.inf, doubted=math.inf)
        return self.tried[pair]

    def _forecast(self, context: BuildContext) -> WireStep:
        plan, costs = context.plan, context.costs
        history, choice = self._programs(context, PLAIN, None)
        resident = context.residents.at(choice.states)
        keeps = any(p.role is OutputRole.UNSHARDED for p in history.program.outputs)
        doubtful = with_slow_operators(costs)
        seconds = doubted = sent = 0.0
        for name, variant, times in runs_of(plan, keeps):
            of_variant = history if variant == PLAIN else self._programs(context, variant, choice)[0]
            lead = resident.seconds if name == "first" and not resident.late else 0.0
            seconds += times * simulate(of_variant.program, costs, lead).seconds
            doubted += times * simulate(of_variant.program, doubtful, lead).seconds
            sent += times * _sent(of_variant.program, costs)
        formats, error = (plan.wire.gather, plan.wire.reduce), _error(plan.wire, history)
        return WireStep(*formats, error, round(sent), resident.step(seconds), DOUBT * resident.step(doubted))

    def _programs(
        self, context: BuildContext, variant: Variant, choice: MemoryDecision | None
    ) -> tuple[History, MemoryDecision]:
        """Run the plan's passes for a variant, as `run_passes` does."""
        if self.plan.memory_budget is not None:
            return run_passes(self.captured.snapshot(), context, variant, choice=choice)
        passes = build(context.plan, variant, costs=context.costs)[self.cut :]
        return PassManager(passes, verify=False, snapshots=False).run(self.start.snapshot()), MemoryDecision()


def with_slow_operators(costs: Costs) -> Costs:
    """Return costs by which a step takes 1 / `DOUBT` of what it takes if operators are as slow as that: links are faster."""
    faster = {
        name: link.model_copy(update={"bandwidth": link.bandwidth * DOUBT, "latency": link.latency / DOUBT})
        for name, link in costs.hardware.links.items()
    }
    return replace(costs, hardware=costs.hardware.model_copy(update={"links": faster}))


def _error(wire: Wire, history: History) -> float:
    """Return the most that an element of a weight or gradient may be wrong by (see the note on errors)."""
    stats = {record.name: record.stats for record in history.records}
    gathers = min(stats.get("compress_gathers", {}).get("gathers", 0), 1)
    reductions = stats.get("compress_reductions", {}).get("roundings", 0)
    drawn = wire.rounding == "stochastic"
    return max(
        times * most_wrong_part(format, wire.block, random) if times else 0.0
        for times, format, random in ((gathers, wire.gather, False), (reductions, wire.reduce, drawn))
    )


def _sent(program: Program, costs: Costs) -> float:
    """Return the bytes of weights and gradients that a rank sends in a program."""
    total = 0.0
    for start in program.nodes:
        if collectives.is_start(start) and info(start).role in (Role.GATHER, Role.REDUCE):
            group = collectives.group_of(start)
            ranks, link = ranks_in(group, program.mesh), costs.hardware.link(group)
            total += (ranks - 1) / ranks * rounds(link, collectives.kind(start)) * bytes_of(start)
    return total

"""A program within the plan's memory budget: what is recomputed, how early gathers start, which weights are kept.

The budget is for the peak of the simulated step at every position. Where the plainest schedule does not fit, values are
recomputed, no more than needed (`passes/remat/solver.py`). What is left of the budget goes first to transfers in
flight, as long as that makes the step shorter; then to weights that are kept from the forward to the backward instead
of being gathered again, those first whose second gather costs most time per byte (DeepCompile's selective unsharding;
Tanaka et al., 2025, "DeepCompile: A Compiler-Driven Approach to Optimizing Distributed Deep Learning Training").
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from zgraph.build.build_context import BuildContext, ResidentMemory
from zgraph.build.pass_pipeline import PLAIN, MemoryDecision, Variant, build
from zgraph.build.recipe import to_recipe
from zgraph.codegen import cpu_gemm
from zgraph.errors import PlanError, SizeError
from zgraph.passes import History, Pass, PassManager
from zgraph.passes.analysis.costs import most_bytes
from zgraph.passes.analysis.live_memory import idle_bytes
from zgraph.passes.analysis.parameter_collectives import gathers_of, largest_layer
from zgraph.passes.analysis.simulator import Forecast, simulate
from zgraph.passes.remat.solver import Solver
from zgraph.plan.plan import Plan
from zgraph.program.groups import ranks_in
from zgraph.program.node import Phase, info
from zgraph.program.program import InputRole, OutputRole, Program, with_gradients_in
from zgraph.program.remark import Remark
from zgraph.program.sizes import Sizes
from zgraph.ranks import compile_progress
from zgraph.units import shown_bytes

SEARCH_STEPS = 10  # the search for the bytes that may be offloaded halves its range this often
STEPS_BELOW = 4  # steps in which the size that segments seem to need is lowered until it fits
MIN_GAIN = 0.01  # the least part of a step that waits for gathers for which a search pays
MIN_RECOMPUTED = 0.0002  # the least part of a step by which recomputing less is worth another try
LEAST_MEMORY = MemoryDecision(room=0, spare=0, reduce=0)


def run_passes(
    captured: Program,
    context: BuildContext,
    variant: Variant = PLAIN,
    *,
    training: bool = True,
    choice: MemoryDecision | None = None,
) -> tuple[History, MemoryDecision]:
    """Run the plan's pipeline over a captured program, which is changed; return its history and what was decided about
    memory.

    With a `choice` (another variant's: both must save the same values) nothing is decided again. Raises `PlanError`
    with the smallest budget that works if the plan's does not, `SizeError` for a size without a bound beside a budget.
    """
    compile_progress.at(compile_progress.PASSES)
    if context.plan.memory_budget is None:
        captured.params = with_gradients_in(context.residents.at(None).homes, captured.params)
        return by_choice(captured, context, variant, MemoryDecision(), training=training), MemoryDecision()
    refuse_unbounded(context.plan, captured.sizes)
    search = Search(captured, context, variant, training)
    return search.run() if choice is None else search.follow(choice)


def refuse_unbounded(plan: Plan, sizes: Sizes) -> None:
    """Raise `SizeError` if the plan has a memory budget and a size of the program has no upper bound."""
    names = sizes.unbounded
    if plan.memory_budget is None or not names:
        return
    shown = ", ".join(map(repr, names))
    declarable = [size.name for size in sizes.every if size.name in names and not size.elements]
    error = SizeError(
        f"size {shown} has no maximum, and memory_budget is set"
        if len(names) == 1
        else f"sizes {shown} have no maximum, and memory_budget is set",
        where="memory_budget",
        why="a step is to fit at the largest sizes, and nothing says how large these will be",
        hint=f'declare one: zgraph.Size("{declarable[0]}", max=…) in place of "{declarable[0]}" in dynamic, or shapes="static"'
        if declarable
        else "bound it in the model (a table of positions), or leave memory_budget out",
    )
    error.sizes = names
    raise error


def by_choice(
    captured: Program,
    context: BuildContext,
    variant: Variant,
    choice: MemoryDecision,
    *,
    training: bool,
    solver: Solver | None = None,
) -> History:
    """Run the plan's pipeline over a captured program, which is changed, with a memory decision already made. `solver`:
    see `build`."""
    plan, costs, pass_filter = context.plan, context.costs, context.pass_filter
    order = context.order(variant)
    passes = build(
        plan,
        variant,
        training=training,
        costs=costs,
        choice=choice,
        solver=solver,
        pass_filter=pass_filter,
        order=order,
        schedule=context.schedule,
    )
    recipe = to_recipe(plan, costs, variant, training, choice, pass_filter) | {"order": order}
    if context.schedule is not None:
        recipe["schedule"] = context.schedule.hardware.model_dump(mode="json")
    return PassManager(pass_filter.cut(passes), verify=pass_filter.verified, recipe=recipe).run(captured)


@dataclass(frozen=True, eq=False)
class Outcome:
    """The simulation of a program with one memory decision."""

    choice: MemoryDecision  # the memory decision
    peak: int  # bytes at the peak, of everything that the rank holds
    seconds: float  # the time of the program, without the update
    forecast: Forecast  # the simulation of the program


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The decision of a search, from which any variant can be made."""

    choice: MemoryDecision  # the memory decision
    search: Search  # the search that made it
    remark: Remark | None = None  # what did not fit, if there is anything

    def history(self, variant: Variant = PLAIN) -> History:
        """Return a variant's history through all passes, verified, with the chosen decision."""
        history = self.search.history(self.choice, variant)
        if self.remark is not None and variant == self.search.variant:
            history.program.remarks.append(self.remark)
        return history


def measured_rate(rate: float) -> float:
    """Return a measured rate rounded to the nearest power of two, so that small differences between runs lead to the
    same program."""
    return float(2.0 ** round(math.log2(rate)))


class Search:
    """Looks for the fastest program within `budget` bytes, by default the plan's.

    `_weighed` says what a program takes of them; `waiting` other micro-batches are alive between its forward and its
    backward.
    """

    waiting = 0

    def __init__(self, captured: Program, context: BuildContext, variant: Variant, training: bool) -> None:
        plan = context.plan
        assert plan.memory_budget is not None
        self.captured = captured
        self.context = context
        self.variant = variant
        self.training = training
        self.offloads = training and plan.offload.tier("activations") is not None
        self.least = LEAST_MEMORY.replace(away=0) if self.offloads else LEAST_MEMORY
        self.budget: int = plan.memory_budget
        passes = self._passes(LEAST_MEMORY)
        self.cut = [p.name for p in passes].index("shard_parameters")
        self.start = self._run(passes[: self.cut], captured.snapshot(), LEAST_MEMORY)  # (the same for all choices)
        self.idle = idle_bytes(captured)
        if plan.backend == "inductor":
            self.idle += cpu_gemm.scratch(captured)
        self.share = context.residents.shares[0]
        self.tried: dict[MemoryDecision, Outcome] = {}
        self.simulated: dict[MemoryDecision, tuple[Forecast, int, int]] = {}

    def run(self) -> tuple[History, MemoryDecision]:
        best, missed = self._best_of_all()
        result = SearchResult(best.choice.replace(states=self.share), self, missed)
        return result.history(self.variant), result.choice

    def _best_of_all(self) -> tuple[Outcome, Remark | None]:
        """Return the outcome of the fastest step, update included, over all shares of the states that may be offloaded.

        The more is offloaded, the less has to be recomputed. Raises `PlanError` where no share fits.
        """
        candidates: list[tuple[float, float, Outcome, Remark | None]] = []
        refused: list[PlanError] = []
        for share in self.context.residents.shares:
            least = min((f.seconds for f, _, _ in self.simulated.values()), default=0.0)
            if any(outcome.seconds <= least for _, _, outcome, _ in candidates):
                break  # (no step is faster than that, and the update hardly changes)
            self._use_share(share)
            if candidates and self.outside.step(least) >= min(candidates, key=lambda way: way[0])[0]:
                continue
            try:
                outcome, missed = self._best()
            except PlanError as error:
                refused.append(error)
            else:
                candidates.append((self.outside.step(outcome.seconds), share, outcome, missed))
        if not candidates:
            refused[-1].hint = self._hint(self._least_at_any_rate())
            raise refused[-1]
        _, share, outcome, missed = min(candidates, key=lambda way: way[:2])
        self._use_share(share)
        return outcome, missed

    def _use_share(self, share: float) -> None:
        self.share, self.tried = share, {}

    @property
    def outside(self) -> ResidentMemory:
        return self.context.residents.at(self.share)

    def _best(self) -> tuple[Outcome, Remark | None]:
        """Return the fastest outcome for one share. Raises `PlanError` where none fits."""
        plain = self._try(self.least)
        base = plain if plain.peak <= self.budget else self._smaller(plain)
        layer = largest_layer(self.start)
        candidates = [base]
        for n in (1, 2, 4):
            spare = max(self.budget - base.peak - layer * n, 0)
            candidates += self._fitted(base.choice.replace(room=layer * n // 2, spare=spare, reduce=layer * n))
        best = min(candidates, key=lambda o: (o.seconds, o.peak))
        outcomes = [self._keep(outcome) for outcome in dict.fromkeys((best, base, *self._with_room(base)))]
        return min(outcomes, key=lambda one: (one[0].seconds, one[0].peak))

    def follow(self, choice: MemoryDecision) -> tuple[History, MemoryDecision]:
        """Run the passes with another variant's decision. Raises `PlanError` if this variant does not fit with it."""
        if choice.states is not None:
            self._use_share(choice.states)
        outcome = self._try(choice)
        if outcome.peak > self.budget:
            raise self._refusal(outcome, f"{self.captured.name} with the gradients and weights of other micro-batches")
        return self.history(choice), choice

    def history(self, choice: MemoryDecision, variant: Variant | None = None) -> History:
        """Return the history through all passes, verified, with a decision; of this variant, or of the one given."""
        return by_choice(
            self._snapshot(self.captured, choice),
            self.context,
            self.variant if variant is None else variant,
            choice,
            training=self.training,
            solver=self._solver if choice.activations is not None else None,
        )

    # -- trying -----------------------------------------------------------------------------------------------------------
    def _passes(self, choice: MemoryDecision, variant: Variant | None = None) -> list[Pass]:
        solver = self._solver if choice.activations is not None else None
        return build(
            self.context.plan,
            self.variant if variant is None else variant,
            training=self.training,
            costs=self.context.costs,
            choice=choice,
            solver=solver,
            pass_filter=self.context.pass_filter,
            schedule=self.context.schedule,
        )

    def _try(self, choice: MemoryDecision) -> Outcome:
        # (without offloaded gradients the program is the same for all shares)
        choice = choice.replace(waiting=self.waiting, states=self.share if self.outside.homes else None)
        if choice not in self.tried:
            self.tried[choice] = self._weighed(choice)
        return self.tried[choice]

    def _weighed(self, choice: MemoryDecision) -> Outcome:
        if choice not in self.simulated:
            program = self._after_cut(choice)
            with self._failures_of(choice):
                forecast = simulate(program, self.context.costs)
            accumulator_bytes = sum(most_bytes(n) for n in program.input_nodes(InputRole.ACCUMULATOR).values())
            self.simulated[choice] = forecast, max(sum(forecast.peak.values()), _after(program)), accumulator_bytes
        forecast, peak, accumulator_bytes = self.simulated[choice]
        # (the program counts `accumulator_bytes` itself)
        peak = max(peak + max(self.outside.held - accumulator_bytes, 0) + self.idle, self.outside.update)
        return Outcome(choice, peak, forecast.seconds, forecast)

    def _after_cut(self, choice: MemoryDecision, until: int | None = None, variant: Variant | None = None) -> Program:
        return self._run(self._passes(choice, variant)[self.cut : until], self._snapshot(self.start, choice), choice)

    def _snapshot(self, program: Program, choice: MemoryDecision) -> Program:
        """Copy a program, with gradients in the tiers that the decision's share of the states gives."""
        snapshot = program.snapshot()
        snapshot.params = with_gradients_in(self.context.residents.at(choice.states).homes, snapshot.params)
        return snapshot

    def _run(self, passes: list[Pass], program: Program, choice: MemoryDecision) -> Program:
        with self._failures_of(choice):
            return PassManager(passes, verify=False, snapshots=False).run(program).program

    @contextlib.contextmanager
    def _failures_of(self, choice: MemoryDecision) -> Iterator[None]:
        """Make a failure inside happen once more with snapshots and the verifier, which leaves a reproducer.

        The search itself runs without both, which is fast.
        """
        try:
            yield
        except PlanError:
            raise
        except Exception:
            self.history(choice)
            raise

    @cached_property
    def _solver(self) -> Solver:
        return Solver(self.start, self.context.costs, self.waiting)

    def _smaller(self, plain: Outcome) -> Outcome:
        """Return the fastest outcome within the budget: with the fewest bytes offloaded, the least recomputed, or some
        of both.

        Raises `PlanError` where even the smallest does not fit.
        """
        if not self.offloads:
            return self._recompute(plain)
        candidates: list[Outcome] = []
        all_offloaded = self._try(LEAST_MEMORY)
        if all_offloaded.peak <= self.budget:
            total = sum(plain.forecast.peak.values())
            self._bisect(
                2**SEARCH_STEPS, lambda stays: LEAST_MEMORY.replace(away=total - total * stays // 2**SEARCH_STEPS)
            )
            candidates += [o for o in self.tried.values() if o.peak <= self.budget]
        for away in (
            (0, plain.forecast.peak.get("activations", 0) // 2, None) if self.context.plan.recompute == "auto" else ()
        ):
            with contextlib.suppress(PlanError):
                candidates.append(self._recompute(all_offloaded, LEAST_MEMORY.replace(away=away)))
        if not candidates:
            smallest = min(self.tried.values(), key=lambda o: o.peak)
            raise self._refusal(smallest, f"{self.captured.name}, with all offloaded or computed again that can be")
        return min(candidates, key=lambda o: (o.seconds, sum(o.forecast.moved.values()), o.peak))

    def _recompute(self, plain: Outcome, least: MemoryDecision = LEAST_MEMORY) -> Outcome:
        """Return the outcome that recomputes nearly the least that it must.

        The next try depends on the budget only through which earlier ones fitted: so a larger budget has tried all that
        a smaller one found. Raises `PlanError` where even the smallest does not fit.
        """
        if self.context.plan.recompute != "auto" or not self.training:
            raise self._refusal(plain, f"{self.captured.name}, with nothing kept and nothing gathered ahead")
        solver = self._solver
        sizes = solver.sizes

        def outcome(at: int) -> Outcome:
            return self._try(least.replace(activations=sizes[at]))

        def seconds(at: int) -> float:
            return solver.seconds(sizes[min(at, len(sizes) - 1)])

        known, high = sizes.index(solver.least()), len(sizes)
        for low in dict.fromkeys(known * part // STEPS_BELOW for part in range(STEPS_BELOW, -1, -1)):
            best = outcome(low)
            if best.peak <= self.budget:
                break
            high = low
        else:
            smallest = min(self.tried.values(), key=lambda o: o.peak)
            raise self._refusal(smallest, f"{self.captured.name}, with all computed again that can be")
        while high - low > 1 and seconds(low) - seconds(high) > MIN_RECOMPUTED * best.seconds:
            middle = (low + high) // 2
            candidate = outcome(middle)
            if candidate.peak <= self.budget:
                low, best = middle, min(best, candidate, key=lambda o: (o.seconds, o.peak))
            else:
                high = middle
        return best

    def _with_room(self, base: Outcome) -> list[Outcome]:
        """Return outcomes that recompute more than they must, so that weights can be kept, where a step waits for
        gathers."""
        used = base.choice.activations
        if used is None or base.forecast.exposed.get("gather", 0.0) < MIN_GAIN * base.seconds:
            return []
        least = self._solver.least()
        others = [
            self._try(base.choice.replace(activations=at)) for at in sorted({least, (least + used) // 2} - {used})
        ]
        return [o for o in others if o.peak <= self.budget]  # (recomputing more may need more memory at once)

    def _fitted(self, choice: MemoryDecision) -> list[Outcome]:
        """Return the outcome of a decision, with fewer bytes for activations if transfers need them; none if it does
        not fit."""
        outcome = self._try(choice)
        if outcome.peak > self.budget and choice.activations is not None:
            outcome = self._try(choice.replace(activations=choice.activations - (outcome.peak - self.budget)))
        return [outcome] if outcome.peak <= self.budget else []

    def _refusal(self, outcome: Outcome, what: str) -> PlanError:
        peaks = sorted(((v, k) for k, v in outcome.forecast.peak.items() if v), reverse=True)
        largest = ", ".join(f"{k} {shown_bytes(v)}" for v, k in peaks[:4])
        resident_bytes = self.outside.held
        outside = f"; {shown_bytes(resident_bytes)} of it are optimizer states and gradients" if resident_bytes else ""
        if outcome.forecast.peak.get("residuals"):
            outside += f"; residuals {shown_bytes(outcome.forecast.peak['residuals'])} of wire.error_feedback"
        if self.outside.update == outcome.peak:
            outside = "; at the update, which brings states to the device: offload.sub_group_bytes may be smaller"
        return PlanError(
            f"a step does not fit into {shown_bytes(self.budget)}",
            where="memory_budget",
            why=f"{what}, needs {shown_bytes(outcome.peak)} at its peak ({largest}{outside}), and takes "
            f"{outcome.seconds * 1e3:.4g} ms by the plan's hardware",
            hint=self._hint(outcome.peak),
        )

    def _hint(self, least: int) -> str:
        plan = self.context.plan
        beside = ""
        if plan.offload.tier("parameters"):  # (with a budget of that size, "auto" might leave them on the device)
            beside = f' with offload={{"parameters": "{plan.offload.parameters}"}}'
        remedies = ["more ranks", "a smaller batch", "a higher ZeRO stage"]
        if plan.recompute != "auto":
            remedies.append('recompute="auto"')
        if not plan.offload.tiers():
            remedies.append("offload")
        elif plan.zero == 3 and not beside:
            remedies.append('offload={"parameters": "cpu"}')
        return f"the smallest that works is {least} bytes{beside}; or {', '.join(remedies[:-1])}, or {remedies[-1]}"

    def _least_at_any_rate(self) -> int:
        """Return the bytes of the smallest program that was tried, as a budget that works in later runs too.

        When values come back from a disk depends on its rate, which is measured in each run: it is the largest of the
        bytes at this rate and at the next ones up and down (see `measured_rate`).
        """
        if not self.tried:
            return 0
        least = min(o.peak for o in self.tried.values())
        if not self.offloads or self.context.plan.offload.tier("activations") != "nvme":
            return least
        for factor in (0.5, 2.0):
            other = copy.copy(self)
            rate = self.context.costs.hardware.nvme * factor
            costs = replace(self.context.costs, hardware=self.context.costs.hardware.model_copy(update={"nvme": rate}))
            other.context = replace(self.context, costs=costs)
            other.simulated, other.tried = {}, {}
            least = max(least, min(other._try(choice).peak for choice in self.tried))
        return least

    # -- kept weights -----------------------------------------------------------------------------------------------------
    def _keep(self, base: Outcome) -> tuple[Outcome, Remark | None]:
        """Keep as many weights as fit, in the order of what their second gather costs; return a remark on the first
        that does not."""
        ranked = self._candidates(base.choice)
        order = [name for _, name in ranked]
        some = self._bisect(len(order), lambda n: base.choice.replace(keep=frozenset(order[:n])))
        best = self._try(base.choice.replace(keep=frozenset(order[:some])))
        if best.seconds > base.seconds:
            best, some = base, 0
        if some == len(order):
            return best, None
        more = self._try(base.choice.replace(keep=frozenset(order[: some + 1]))).peak
        return best, Remark(
            "regather",
            order[some],
            f"{order[some]} and {len(order) - some - 1} other weights are gathered again for the backward",
            f"kept, the peak would reach {shown_bytes(more)}, budget {shown_bytes(self.budget)}",
            sum(seconds for seconds, _ in ranked[some:]),
            f"memory_budget={more} has room for the first of them",
        )

    def _bisect(self, most: int, choice: Callable[[int], MemoryDecision]) -> int:
        """Return the largest number up to `most` whose decision fits; 0 is known to fit."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            fits = self._try(choice(middle)).peak <= self.budget
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def _candidates(self, choice: MemoryDecision) -> list[tuple[float, str]]:
        """Return the weights that both phases gather, with the seconds of their second gather.

        Those with the most seconds per byte come first, then those whose second gather is earliest.
        """
        names = [p.name for p in self._passes(choice)]
        if "regather" not in names:
            return []
        program = self._after_cut(choice, until=names.index("regather") + 1)
        second_gathers: dict[str, tuple[float, int]] = {}
        for at, gather in enumerate(gathers_of(program)):
            if info(gather.start).phase is Phase.BACKWARD:
                ranks = ranks_in(str(info(gather.start).mesh_dim), program.mesh)
                seconds, place = second_gathers.get(gather.name, (0.0, at))
                second_gathers[gather.name] = (seconds + self.context.costs.transfer([gather.start], ranks), place)
        sizes = {g.name: max(g.bytes, 1) for g in gathers_of(program)}
        ranked = sorted(second_gathers.items(), key=lambda i: (-round(i[1][0] / sizes[i[0]] * 1e12), i[1][1]))
        return [(seconds, name) for name, (seconds, _) in ranked]


def _after(program: Program) -> int:
    """Return the bytes held at the end of the update: parameters, gradients, and the first gathers of the next step
    with their operands."""
    params = program.input_nodes(InputRole.PARAMETER).values()
    grads = [n for p, n in program.output_items() if p.role is OutputRole.GRADIENT]
    held_bytes = sum(most_bytes(n) for n in (*params, *grads) if info(n).home is None)
    for gather in gathers_of(program):
        if info(gather.start).ahead:
            held_bytes += gather.bytes + sum(most_bytes(a) for a in gather.start.all_input_nodes)
    return held_bytes
